"""Messages sealed with AES-256-GCM (NIST SP 800-38D): a dealer's two shares, and what coordinator processes relay.

A dealer's shares, for a holder:

    key     derive.channel_key(shared, session, dealer, holder)
    nonce   12 zero bytes
    aad     session digest || u32(dealer) || u32(holder)
    text    the share of b (33 bytes) || the share of the mask key's seed (33)            sealed: 82 bytes

What a client has revealed, sealed by the coordinator process that it reached for the one that unmasks. Clients never
see this, so it may change from one version to the next:

    key     derive.relay_key: X25519 of a key pair for this message alone and the key that the other has published
    nonce   12 zero bytes
    aad     session digest || u32(index of the client)
    sealed  public key of the pair (32 bytes) || AES-256-GCM of the message (16 bytes longer)

The nonce may be constant because a key seals one message: it is made from fresh keys, for one session and direction. A
dealer that seals twice in a session must seal the same bytes.
"""

from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from umbel.aggregation.secagg.crypto.curve import KEY_BYTES, KeyPair
from umbel.aggregation.secagg.crypto.derive import channel_key, relay_key, u32
from umbel.aggregation.secagg.crypto.shamir import SHARE_BYTES, share_value
from umbel.aggregation.secagg.errors import BadKey, BadShare

_NONCE = bytes(12)
_TAG_BYTES = 16
SEALED_BYTES = 2 * SHARE_BYTES + _TAG_BYTES


def seal(shared: bytes, session: bytes, dealer: int, holder: int, shares: tuple[bytes, bytes]) -> bytes:
    """Seal `shares` (of b, of the mask key's seed; 33 bytes each): 82 bytes. Raises `BadShare` for other bytes.

    `shared`: the X25519 secret of the two clients' channel keys, 32 bytes.
    """
    for share in shares:
        share_value(share)
    key, associated = _of_channel(shared, session, dealer, holder)
    return key.encrypt(_NONCE, b"".join(shares), associated)


def open_sealed(shared: bytes, session: bytes, dealer: int, holder: int, sealed: bytes) -> tuple[bytes, bytes]:
    """The shares that `dealer` has sealed for `holder`. Raises `BadShare` for anything else."""
    if len(sealed) != SEALED_BYTES:
        raise BadShare(f"two sealed shares must have {SEALED_BYTES} bytes, not {len(sealed)}")
    key, associated = _of_channel(shared, session, dealer, holder)
    try:
        text = key.decrypt(_NONCE, sealed, associated)
    except InvalidTag as error:
        raise BadShare(
            f"these shares were not sealed by client {dealer} for client {holder} in this attempt"
        ) from error
    shares = text[:SHARE_BYTES], text[SHARE_BYTES:]
    for share in shares:
        share_value(share)
    return shares


def _of_channel(shared: bytes, session: bytes, dealer: int, holder: int) -> tuple[AESGCM, bytes]:
    return AESGCM(channel_key(shared, session, dealer, holder)), session + u32(dealer) + u32(holder)


def seal_relayed(to: bytes, session: bytes, index: int, message: bytes, random: Callable[[int], bytes]) -> bytes:
    """Seal what client `index` has sent for the holder of the public key `to`: 48 bytes more. Raises `BadKey`.

    `random(n)`: returns n bytes that nobody can guess.
    """
    pair = KeyPair(random(KEY_BYTES))
    key = relay_key(pair.shared(to), session, index, pair.public, to)
    return pair.public + AESGCM(key).encrypt(_NONCE, message, session + u32(index))


def open_relayed(own: KeyPair, session: bytes, index: int, sealed: bytes) -> bytes:
    """The message of client `index`. Raises `BadShare` for one that was not sealed for this key, session and client."""
    if len(sealed) < KEY_BYTES + _TAG_BYTES:
        raise BadShare(f"a relayed message must have at least {KEY_BYTES + _TAG_BYTES} bytes, not {len(sealed)}")
    sender, text = sealed[:KEY_BYTES], sealed[KEY_BYTES:]
    try:
        key = relay_key(own.shared(sender), session, index, sender, own.public)
        return AESGCM(key).decrypt(_NONCE, text, session + u32(index))
    except (InvalidTag, BadKey) as error:
        raise BadShare(
            f"the message of client {index} was not sealed for this coordinator process and attempt"
        ) from error
