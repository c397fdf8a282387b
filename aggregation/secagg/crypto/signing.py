"""What a client signs of a secure round, with its identity key (Ed25519): one label for each kind of message.

    label || 0x00 || digest (32 bytes) || SHA-256(payload)

`digest`: the context's for advertised keys, the session's for all that follows (`derive.py`). Neither label nor digest
can be taken for another's, so a signature counts for one message of one client in one attempt.
"""

import hashlib
from enum import StrEnum

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from umbel.aggregation.secagg.crypto.derive import DIGEST_BYTES, PROTOCOL, SIGNATURE_BYTES
from umbel.aggregation.secagg.errors import ForgedMessage
from umbel.aggregation.trust.public_keys import require_public_key


class Label(StrEnum):
    """The messages that are signed, by what they carry."""

    ADVERTISE_KEYS = "advertise keys"
    SHARE_KEYS = "share keys"
    MASKED_INPUT = "masked input"
    CONSISTENCY = "consistency"


def sign(key: Ed25519PrivateKey, label: Label, digest: bytes, payload: bytes) -> bytes:
    """Sign a message: 64 bytes. Raises `ValueError` for a digest that has not 32."""
    return key.sign(_signed(label, digest, payload))


def verify(public: bytes, label: Label, digest: bytes, payload: bytes, signature: bytes) -> None:
    """Raise `ForgedMessage` unless the owner of `public` (32 raw bytes) has signed this.

    Also where `public` is no key that somebody may have made: with a point of small order, one signature fits much.
    Raises `ValueError` for a digest, which is always our own, that has not 32 bytes.
    """
    signed = _signed(label, digest, payload)
    if len(signature) != SIGNATURE_BYTES:
        raise ForgedMessage(f"a signature has {SIGNATURE_BYTES} bytes, not {len(signature)}")
    try:
        require_public_key(public)
        Ed25519PublicKey.from_public_bytes(public).verify(signature, signed)
    except (InvalidSignature, ValueError) as error:
        raise ForgedMessage(f"the message ({label}) is not signed by the key of the client that it names") from error


def _signed(label: Label, digest: bytes, payload: bytes) -> bytes:
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"a digest has {DIGEST_BYTES} bytes, not {len(digest)}")
    return PROTOCOL + label.encode() + b"\0" + digest + hashlib.sha256(payload).digest()
