"""A client's signatures in a secure round, with its identity key (Ed25519): one label for each kind of message.

    label || 0x00 || digest (32 bytes) || SHA-256(payload)

`digest`: the context's for advertised keys, the session's for all later messages (`derive.py`). So a signature is valid
for one message of one client in one attempt.
"""

import hashlib
from enum import StrEnum

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from umbel.aggregation.secagg.crypto.derive import DIGEST_BYTES, PROTOCOL, SIGNATURE_BYTES
from umbel.aggregation.secagg.errors import ForgedMessage
from umbel.aggregation.trust.public_keys import require_public_key


class Label(StrEnum):
    ADVERTISE_KEYS = "advertise keys"
    SHARE_KEYS = "share keys"
    MASKED_INPUT = "masked input"
    CONSISTENCY = "consistency"


def sign(key: Ed25519PrivateKey, label: Label, digest: bytes, payload: bytes) -> bytes:
    """Sign a message: 64 bytes. Raises `ValueError` unless the digest has 32."""
    return key.sign(_signed(label, digest, payload))


def verify(public: bytes, label: Label, digest: bytes, payload: bytes, signature: bytes) -> None:
    """Raise `ForgedMessage` unless the owner of `public` (32 raw bytes) has signed this payload.

    Also refuses a point of small order as `public`, for which one signature fits many messages. Raises `ValueError`
    unless the digest, which is always our own, has 32 bytes.
    """
    signed = _signed(label, digest, payload)
    if len(signature) != SIGNATURE_BYTES:
        raise ForgedMessage(f"a signature must have {SIGNATURE_BYTES} bytes, not {len(signature)}")
    try:
        require_public_key(public)
        Ed25519PublicKey.from_public_bytes(public).verify(signature, signed)
    except (InvalidSignature, ValueError) as error:
        raise ForgedMessage(f"the message ({label}) is not signed by its client's key") from error


def _signed(label: Label, digest: bytes, payload: bytes) -> bytes:
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"a digest must have {DIGEST_BYTES} bytes, not {len(digest)}")
    return PROTOCOL + label.encode() + b"\0" + digest + hashlib.sha256(payload).digest()
