"""Ed25519 public keys: one spelling for each point, and no point of small order."""

import base64
import binascii

KEY_BYTES = 32

# The eight points of small order on edwards25519, by their y (the sign bit chooses between x and -x). For such a "key"
# one constant signature fits many messages. Chalkias, Garillot, Nikolaenko, "Taming the many EdDSAs" (2020), table 1;
# with y below the prime (RFC 8032, 5.1.3) each has just these encodings.
_FIELD_PRIME = (1 << 255) - 19
_SMALL_ORDER_Y = frozenset(
    (
        1,  # the identity
        _FIELD_PRIME - 1,  # order 2
        0,  # order 4, two points
        0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826,  # order 8, two points
        0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7,  # order 8, two points
    )
)


def require_public_key(raw: bytes, what: str = "public_key") -> None:
    """Raise `ValueError` unless `raw` can be an Ed25519 public key that was made from a private key."""
    if len(raw) != KEY_BYTES:
        raise ValueError(f"{what} must be the {KEY_BYTES} raw bytes of an Ed25519 key, not {len(raw)}, in base64")
    y = int.from_bytes(raw, "little") & ((1 << 255) - 1)
    if y >= _FIELD_PRIME or y in _SMALL_ORDER_Y:
        raise ValueError(f"{what} is a point that belongs to no private key; make the key with an Ed25519 library")


def public_key_bytes(text: str, what: str = "public_key") -> bytes:
    """The 32 bytes of a key in base64. Raises `ValueError` for any other text, and as `require_public_key` does."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{what} must be base64") from error
    require_public_key(raw, what)
    return raw


def public_key_text(raw: bytes) -> str:
    """A key in the one spelling that comparisons rely on: base64 of its 32 bytes."""
    return base64.b64encode(raw).decode()
