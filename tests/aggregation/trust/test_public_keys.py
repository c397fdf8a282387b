"""The keys that a client may enrol: no small order, one spelling; and the fingerprints that people compare."""

import base64
import hashlib
import re

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.messages import Enrolment
from umbel.aggregation.trust.public_keys import fingerprint, grouped, members_sha256_of, sha256_of_groups, short_groups

P = (1 << 255) - 19
D = -121665 * pow(121666, -1, P) % P
ORDER_8 = (
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
)
SMALL_ORDER = [(1).to_bytes(32, "little"), (P - 1).to_bytes(32, "little"), bytes(32), *map(bytes.fromhex, ORDER_8)]


def with_sign(raw: bytes) -> bytes:
    return raw[:31] + bytes([raw[31] | 0x80])


def enrol(raw: bytes) -> Enrolment:
    return Enrolment("token", "ward-7", base64.b64encode(raw).decode())


def doubled(y: int) -> int:
    """The y of twice a point of edwards25519 (-x^2 + y^2 = 1 + d x^2 y^2), which does not depend on the sign of x."""
    x2 = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    return (y * y + x2) * pow(1 - D * x2 * y * y, -1, P) % P


@pytest.mark.parametrize("raw", [*SMALL_ORDER, *map(with_sign, SMALL_ORDER)], ids=bytes.hex)
def test_a_key_of_small_order_is_refused(raw: bytes) -> None:
    y = int.from_bytes(raw, "little") & ((1 << 255) - 1)
    assert doubled(doubled(doubled(y))) == 1, "the table holds points of small order"
    with pytest.raises(ValueError, match="no private key"):
        enrol(raw)


@pytest.mark.parametrize("y", [P, P + 1, P + 3, (1 << 255) - 1])
def test_a_second_spelling_of_a_point_is_refused(y: int) -> None:
    for raw in (y.to_bytes(32, "little"), with_sign(y.to_bytes(32, "little"))):
        with pytest.raises(ValueError, match="no private key"):
            enrol(raw)


@pytest.mark.parametrize("n_bytes", [0, 31, 33])
def test_a_key_of_another_length_is_refused(n_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"Ed25519 key of 32 raw bytes, in base64; it has {n_bytes} bytes"):
        enrol(bytes([9]) * n_bytes)


def test_a_key_that_was_made_is_taken() -> None:
    raw = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    assert enrol(raw).public_key_bytes == raw


@given(st.binary(min_size=32, max_size=32))
def test_a_keys_fingerprint_is_eight_groups_of_a_labelled_hash(key: bytes) -> None:
    said = fingerprint(key)
    assert re.fullmatch(r"([0-9A-F]{4} ){7}[0-9A-F]{4}", said)
    assert bytes.fromhex(said) == hashlib.sha256(b"umbel key fingerprint 1\n" + key).digest()[:16]


@given(st.binary(min_size=32, max_size=32))
def test_a_hash_that_was_read_out_is_the_hash(digest: bytes) -> None:
    sha256 = digest.hex()
    assert sha256_of_groups(grouped(sha256)) == sha256 == sha256_of_groups(sha256)
    assert len(grouped(sha256).split()) == 16


@pytest.mark.parametrize("text", ["", "7F3A", "0" * 63, "0" * 65, "g" * 64, "٠" * 64])
def test_what_is_no_hash_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="64 lower-case hex digits"):
        sha256_of_groups(text)


def test_a_hash_in_short_is_the_beginning_of_what_is_read_out() -> None:
    assert short_groups("07f5be6fa2bdb100033fd3b4") == "07F5 BE6F A2BD B100"
    assert short_groups("") == ""


def test_the_setting_of_a_list_takes_both_spellings_and_names_itself() -> None:
    assert members_sha256_of("07F5 BE6F " * 8) == "07f5be6f" * 8 == members_sha256_of("07f5be6f" * 8)
    with pytest.raises(ValueError, match="members_sha256 must be the 64 hex digits that `umbel members show` prints"):
        members_sha256_of("07F5")
