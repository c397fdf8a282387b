"""Signed requests: HTTP Message Signatures (RFC 9421) with Ed25519, in one fixed form.

A request carries

```
Content-Digest: sha-256=:<base64 of the SHA-256 of the body as sent>:                       (RFC 9530)
Signature-Input: umbel=("@method" "@path" "@query" "content-digest")
                 ;created=<unix seconds>;nonce="<22-43 chars>";keyid="<client>";alg="ed25519"      (one line, no blanks)
Signature: umbel=:<base64 of 64 bytes>:
```

and the signature covers the RFC 9421 signature base of exactly those four components, in that order. An empty body
has the digest of no bytes. Fixing the form keeps the reader a single regular expression: nothing a peer sends can
choose what is covered. Any RFC 9421 library in any language can produce it.

The verifier checks the signature *before* it reads the body, then hashes the body as it streams.
"""

import base64
import binascii
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from umbel.aggregation.errors import BadSignature, MalformedSignature, StaleSignature

CLOCK_SKEW_S = 300
Check: TypeAlias = Callable[[bytes, bytes, bytes], None]
"""Checks a public key, a signature and the signed bytes. Raises `InvalidSignature`, or `ValueError` for a bad key."""

_COMPONENTS = '("@method" "@path" "@query" "content-digest")'
_PARAMS = re.compile(
    re.escape(_COMPONENTS)
    + r';created=(?P<created>[0-9]{1,12});nonce="(?P<nonce>[A-Za-z0-9_-]{22,43})"'
    + r';keyid="(?P<keyid>[a-z0-9_-]{1,63})";alg="ed25519"'
)
_DIGEST = re.compile(r"sha-256=:([A-Za-z0-9+/]{43}=):")
_SIGNATURE = re.compile(r"umbel=:([A-Za-z0-9+/]{86}==):")


@dataclass(frozen=True, slots=True)
class Target:
    """The signed parts of a request line."""

    method: str
    path: str  # as sent, percent-encoded
    query: str = ""  # without the question mark


@dataclass(frozen=True, slots=True)
class SignedHeaders:
    """The three header fields of a signed request, as text."""

    content_digest: str
    signature_input: str
    signature: str

    def as_dict(self) -> dict[str, str]:
        return {
            "Content-Digest": self.content_digest,
            "Signature-Input": self.signature_input,
            "Signature": self.signature,
        }


@dataclass(frozen=True, slots=True)
class Claims:
    """A well-formed signature's content, not yet verified."""

    key_id: str
    created: int
    nonce: str
    body_sha256: bytes  # 32 bytes that the body must hash to
    _params: str
    _content_digest: str
    _signature: bytes

    @property
    def signature(self) -> str:
        """The signature, base64."""
        return base64.b64encode(self._signature).decode()

    def verify(self, public_key: bytes, target: Target, now: float, check: Check | None = None) -> None:
        """Raise `BadSignature` unless `public_key` (32 raw bytes) signed this target, `StaleSignature` unless recently.

        `check` verifies the signature itself; None uses OpenSSL, which every audit uses. The caller must then refuse a
        repeated nonce, remembering each until `created + CLOCK_SKEW_S`, and a body with another SHA-256.
        """
        try:
            base = signature_base(_components(target, self._content_digest), self._params)
            (check or _openssl)(public_key, self._signature, base)
        except (InvalidSignature, ValueError) as error:
            raise BadSignature(f"the signature does not match the key of {self.key_id!r}") from error
        if abs(now - self.created) > CLOCK_SKEW_S:
            way = "ahead of" if self.created > now else "behind"
            raise StaleSignature(
                f"the request was signed {abs(now - self.created):.0f} s {way} the coordinator's clock, and at most "
                f"{CLOCK_SKEW_S} s are allowed; set the clock of the client's machine"
            )


def _openssl(public_key: bytes, signature: bytes, signed: bytes) -> None:
    Ed25519PublicKey.from_public_bytes(public_key).verify(signature, signed)


def content_digest(body_sha256: bytes) -> str:
    """The value of `Content-Digest` (or `Repr-Digest`) for a SHA-256 of 32 bytes."""
    return f"sha-256=:{base64.b64encode(body_sha256).decode()}:"


def parse_digest(value: str) -> bytes:
    """The 32 bytes in a `Content-Digest` or `Repr-Digest`. Raises `MalformedSignature`."""
    match = _DIGEST.fullmatch(value)
    if match is None:
        raise MalformedSignature("a Content-Digest or Repr-Digest must have the form sha-256=:<base64 of 32 bytes>:")
    return _decode(match[1], "the digest")


def sign(
    key: Ed25519PrivateKey, key_id: str, target: Target, body_sha256: bytes, created: int, nonce: str
) -> SignedHeaders:
    """Sign a request. `nonce`: 22 to 43 URL-safe characters, never used twice; `created`: Unix seconds.

    Raises `ValueError` for text that a signature cannot hold. Paths and queries must be percent-encoded.
    """
    params, digest = _params_of(key_id, created, nonce), content_digest(body_sha256)
    signature = key.sign(signature_base(_components(target, digest), params))
    return signed_headers(key_id, digest, created, nonce, base64.b64encode(signature).decode())


def signed_headers(key_id: str, digest: str, created: int, nonce: str, signature: str) -> SignedHeaders:
    """The header fields of an already signed request, from the parts in its `Claims`. Raises `ValueError`.

    `digest`: from `content_digest`. `signature`: base64.
    """
    return SignedHeaders(digest, f"umbel={_params_of(key_id, created, nonce)}", f"umbel=:{signature}:")


def parse(headers: SignedHeaders) -> Claims:
    """Read a request's three header fields. Raises `MalformedSignature` for any form other than the one above."""
    label, _, params = headers.signature_input.partition("=")
    match = _PARAMS.fullmatch(params)
    signature = _SIGNATURE.fullmatch(headers.signature)
    if label != "umbel" or match is None or signature is None:
        raise MalformedSignature(
            "the headers Signature-Input and Signature are missing, or not in the form of docs/reference/wire.md"
        )
    return Claims(
        key_id=match["keyid"],
        created=int(match["created"]),
        nonce=match["nonce"],
        body_sha256=parse_digest(headers.content_digest),
        _params=params,
        _content_digest=headers.content_digest,
        _signature=_decode(signature[1], "the signature"),
    )


def signature_base(components: Iterable[tuple[str, str]], params: str) -> bytes:
    """The signed bytes: RFC 9421, section 2.5, for components without parameters.

    Raises `ValueError` for a value with a line break, which could pass for another component, and beyond ASCII.
    """
    lines = [f'"{name}": {value}' for name, value in (*components, ("@signature-params", params))]
    if any("\n" in line or "\r" in line for line in lines):
        raise ValueError("a signed component holds a line break")
    return "\n".join(lines).encode("ascii")


def _params_of(key_id: str, created: int, nonce: str) -> str:
    params = f'{_COMPONENTS};created={created};nonce="{nonce}";keyid="{key_id}";alg="ed25519"'
    if not _PARAMS.fullmatch(params):
        raise ValueError(
            "key_id, nonce or created contains a character that a signature header does not allow, or is too long"
        )
    return params


def _components(target: Target, digest: str) -> tuple[tuple[str, str], ...]:
    return (
        ("@method", target.method.upper()),
        ("@path", target.path),
        ("@query", f"?{target.query}"),
        ("content-digest", digest),
    )


def _decode(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise MalformedSignature(f"{what} is not valid base64") from error
