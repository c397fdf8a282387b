"""Signed requests: RFC 9421's own vector, every tampered component, the clock, and hostile headers."""

import base64
import hashlib
import re
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_der_private_key, load_der_public_key
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.errors import BadSignature, MalformedSignature, SignatureRefused, StaleSignature
from umbel.aggregation.trust.signatures import (
    CLOCK_SKEW_S,
    SignedHeaders,
    Target,
    content_digest,
    parse,
    parse_digest,
    sign,
    signature_base,
)

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
TARGET = Target("PUT", "/v1/assignments/demo.3.1.ward-7/report", "dry=1")
BODY = hashlib.sha256(b"{}").digest()
EMPTY_SHA256 = bytes.fromhex("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
NOW = 1_750_000_000
NONCE = "abcdefghijklmnopqrstuv"


def signed(target: Target = TARGET, body: bytes = BODY, created: int = NOW) -> SignedHeaders:
    return sign(KEY, "ward-7", target, body, created, NONCE)


def test_the_vector_of_rfc_9421_appendix_b_2_6() -> None:
    """Our base and our Ed25519 give the RFC's own bytes (key test-key-ed25519 of appendix B.1.4)."""
    private = load_der_private_key(
        base64.b64decode("MC4CAQAwBQYDK2VwBCIEIJ+DYvh6SEqVTm50DFtMDoQikTmiCqirVv9mWG9qfSnF"), password=None
    )
    public = load_der_public_key(base64.b64decode("MCowBQYDK2VwAyEAJrQLj5P/89iXES9+vFgrIy29clF9CC/oPPsw3c5D0bs="))
    assert isinstance(private, Ed25519PrivateKey)
    assert isinstance(public, Ed25519PublicKey)
    components = (
        ("date", "Tue, 20 Apr 2021 02:07:55 GMT"),
        ("@method", "POST"),
        ("@path", "/foo"),
        ("@authority", "example.com"),
        ("content-type", "application/json"),
        ("content-length", "18"),
    )
    names = " ".join(f'"{name}"' for name, _ in components)
    base = signature_base(components, f'({names});created=1618884473;keyid="test-key-ed25519"')
    signature = "wqcAqbmYJ2ji2glfAMaRy4gruYYnx2nEFN2HN6jrnDnQCK1u02Gb04v9EDgwUPiu4A0w6vuQv5lIp5WPpBKRCw=="
    assert base64.b64encode(private.sign(base)).decode() == signature
    public.verify(base64.b64decode(signature), base)


def test_a_signed_request_says_who_when_and_what() -> None:
    claims = parse(signed())
    claims.verify(PUBLIC, TARGET, NOW)
    assert (claims.key_id, claims.created, claims.nonce, claims.body_sha256) == ("ward-7", NOW, NONCE, BODY)


def test_the_headers_read_as_the_documentation_says() -> None:
    assert signed(body=EMPTY_SHA256).as_dict() == {
        "Content-Digest": "sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:",
        "Signature-Input": 'umbel=("@method" "@path" "@query" "content-digest");created=1750000000;'
        'nonce="abcdefghijklmnopqrstuv";keyid="ward-7";alg="ed25519"',
        "Signature": signed(body=EMPTY_SHA256).signature,
    }
    assert hashlib.sha256(b"").digest() == EMPTY_SHA256


@pytest.mark.parametrize(
    "target",
    [
        replace(TARGET, method="POST"),
        replace(TARGET, path=TARGET.path + "/"),
        replace(TARGET, path=TARGET.path.replace("ward-7", "ward-8")),
        replace(TARGET, query=""),
        replace(TARGET, query="dry=0"),
        replace(TARGET, path=TARGET.path + "\n"),
        replace(TARGET, path=TARGET.path + "é"),
        replace(TARGET, path=TARGET.path + "\ud800"),
    ],
)
def test_a_request_for_something_else_is_refused(target: Target) -> None:
    with pytest.raises(BadSignature):
        parse(signed()).verify(PUBLIC, target, NOW)


@pytest.mark.parametrize(
    ("field", "old", "new"),
    [
        ("content_digest", content_digest(BODY), content_digest(EMPTY_SHA256)),
        ("signature_input", f"created={NOW}", f"created={NOW + 1}"),
        ("signature_input", NONCE, NONCE[::-1]),
        ("signature_input", NONCE, NONCE + "x"),
        ("signature_input", "ward-7", "ward-8"),
        ("signature", "umbel=:", "umbel=:A"),
    ],
)
def test_every_tampered_component_is_refused(field: str, old: str, new: str) -> None:
    headers = signed()
    text = getattr(headers, field).replace(old, new)
    if field == "signature":
        text = "umbel=:A" + ("B" if text[8] != "B" else "C") + text[10:]
    with pytest.raises(BadSignature):
        parse(replace(headers, **{field: text})).verify(PUBLIC, TARGET, NOW)


def test_another_key_is_refused() -> None:
    stranger = Ed25519PrivateKey.from_private_bytes(b"\1" * 32).public_key().public_bytes_raw()
    for key in (stranger, b"", PUBLIC[:31], PUBLIC + b"\0"):
        with pytest.raises(BadSignature):
            parse(signed()).verify(key, TARGET, NOW)


@pytest.mark.parametrize(
    ("offset", "words"), [(CLOCK_SKEW_S + 1, "301 s behind"), (-CLOCK_SKEW_S - 1, "301 s ahead of")]
)
def test_a_signature_from_another_time_is_refused(offset: int, words: str) -> None:
    with pytest.raises(StaleSignature, match=f"signed {words} the coordinator's clock"):
        parse(signed()).verify(PUBLIC, TARGET, NOW + offset)


@pytest.mark.parametrize("offset", [CLOCK_SKEW_S, 0.5, 0, -CLOCK_SKEW_S])
def test_a_clock_that_is_a_little_off_is_accepted(offset: float) -> None:
    parse(signed()).verify(PUBLIC, TARGET, NOW + offset)


def test_a_forger_with_a_wrong_clock_learns_nothing_about_the_clock() -> None:
    with pytest.raises(BadSignature):
        parse(signed()).verify(PUBLIC[::-1], TARGET, NOW + 10_000)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text + " ",
        lambda text: text + "\n",
        lambda text: " " + text,
        lambda text: text.replace("umbel=", "sig1="),
        lambda text: text.replace(";", "; "),
        lambda text: text.replace("sha-256", "sha-512"),
        lambda text: text.replace("=:", "="),
        lambda text: text + ", " + text,
    ],
)
@pytest.mark.parametrize("field", ["content_digest", "signature_input", "signature"])
def test_any_other_form_is_malformed(field: str, change: object) -> None:
    assert callable(change)
    text = getattr(signed(), field)
    if (changed := change(text)) != text:
        with pytest.raises(MalformedSignature):
            parse(replace(signed(), **{field: changed}))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"@query" ', ""),
        ('("@method" "@path"', '("@path" "@method"'),
        ('"content-digest"', '"content-digest" "x"'),
        (str(NOW), "1" * 13),
        (str(NOW), "-1"),
        (str(NOW), "\u0661\u0662"),  # Arabic digits are digits to Python, not to the RFC
        (NONCE, "short"),
        (NONCE, "x" * 44),
        (NONCE, "a b" * 8),
        ("ward-7", ""),
        ("ward-7", "Ward 7"),
        ("ward-7", "x" * 64),
        ("ed25519", "hmac-sha256"),
        (';alg="ed25519"', ""),
        (';alg="ed25519"', ';alg="ed25519";expires=9'),
    ],
)
def test_nothing_a_peer_sends_can_choose_what_is_covered(old: str, new: str) -> None:
    headers = signed()
    assert old in headers.signature_input
    with pytest.raises(MalformedSignature):
        parse(replace(headers, signature_input=headers.signature_input.replace(old, new)))


@given(st.text(), st.text(), st.text())
def test_random_headers_are_malformed(digest: str, signature_input: str, signature: str) -> None:
    with pytest.raises(MalformedSignature):
        parse(SignedHeaders(digest, signature_input, signature))


@given(st.sampled_from(["content_digest", "signature_input", "signature"]), st.data())
def test_one_changed_character_is_refused_or_the_same_bytes(field: str, data: st.DataObject) -> None:
    headers = signed()
    text = getattr(headers, field)
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.characters(exclude_characters=text[at])) + text[at + 1 :]
    tampered = replace(headers, **{field: changed})
    try:
        parse(tampered).verify(PUBLIC, TARGET, NOW)
    except SignatureRefused:
        return
    # base64 leaves four bits of a last character unread: another spelling of the same signature, nothing else.
    assert field == "signature"
    assert re.sub(r".==:$", "", changed) == re.sub(r".==:$", "", text)


@pytest.mark.parametrize(
    ("key_id", "created", "nonce"),
    [
        ("Ward", NOW, NONCE),
        ("", NOW, NONCE),
        ("w", -1, NONCE),
        ("w", 10**12, NONCE),
        ("w", NOW, "short"),
        ("w", NOW, NONCE + '"'),
    ],
)
def test_what_cannot_stand_in_a_signature_is_not_signed(key_id: str, created: int, nonce: str) -> None:
    with pytest.raises(ValueError, match="a character that a signature header does not allow"):
        sign(KEY, key_id, TARGET, BODY, created, nonce)


@pytest.mark.parametrize("path", ["/a\nb", "/a\rb", "/ä"])
def test_a_path_that_is_not_percent_encoded_is_not_signed(path: str) -> None:
    with pytest.raises(ValueError, match=r"line break|ascii"):
        sign(KEY, "ward-7", Target("GET", path), BODY, NOW, NONCE)


@given(st.binary(min_size=32, max_size=32))
def test_digests_round_trip(sha256: bytes) -> None:
    assert parse_digest(content_digest(sha256)) == sha256
