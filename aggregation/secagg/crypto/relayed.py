"""What a client reveals, sealed by the coordinator process that it reached for the one that unmasks.

    key     derive.relay_key: X25519 of a key pair for this message alone and the key that the other has published
    nonce   12 zero bytes: the key seals one message
    aad     session digest || u32(index of the client)
    sealed  public key of the pair (32 bytes) || AES-256-GCM of the message (16 more than it has)

No part of what clients speak; it may change from one version to the next.
"""

from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from umbel.aggregation.secagg.crypto.curve import KEY_BYTES, KeyPair
from umbel.aggregation.secagg.crypto.derive import relay_key, u32
from umbel.aggregation.secagg.errors import BadKey, BadShare

_NONCE = bytes(12)
_TAG_BYTES = 16


def seal_relayed(to: bytes, session: bytes, index: int, message: bytes, random: Callable[[int], bytes]) -> bytes:
    """Seal what client `index` has sent for the holder of the public key `to`: 48 bytes more. Raises `BadKey`.

    `random`: that many bytes that nobody can guess.
    """
    pair = KeyPair(random(KEY_BYTES))
    key = relay_key(pair.shared(to), session, index, pair.public, to)
    return pair.public + AESGCM(key).encrypt(_NONCE, message, session + u32(index))


def open_relayed(own: KeyPair, session: bytes, index: int, sealed: bytes) -> bytes:
    """What client `index` has sent. Raises `BadShare` for what was not sealed for this key, here, of this client."""
    if len(sealed) < KEY_BYTES + _TAG_BYTES:
        raise BadShare(f"a relayed message has {KEY_BYTES + _TAG_BYTES} bytes or more, not {len(sealed)}")
    sender, text = sealed[:KEY_BYTES], sealed[KEY_BYTES:]
    try:
        key = relay_key(own.shared(sender), session, index, sender, own.public)
        return AESGCM(key).decrypt(_NONCE, text, session + u32(index))
    except (InvalidTag, BadKey) as error:
        raise BadShare(f"this message of client {index} was not relayed to this process, here") from error
