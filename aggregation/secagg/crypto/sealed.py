"""The two shares that a dealer sends to a holder, sealed: AES-256-GCM (NIST SP 800-38D).

    key     derive.channel_key(shared, session, dealer, holder)
    nonce   12 zero bytes
    aad     session digest || u32(dealer) || u32(holder)
    text    the share of b (33 bytes) || the share of the mask key's seed (33)            sealed: 82 bytes

The nonce may be constant because a key seals one message: it is of fresh keys, of one session and of one direction. Who
seals twice in a session must seal the same bytes.
"""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from umbel.aggregation.secagg.crypto.derive import channel_key, u32
from umbel.aggregation.secagg.crypto.shamir import SHARE_BYTES, share_value
from umbel.aggregation.secagg.errors import BadShare

SEALED_BYTES = 2 * SHARE_BYTES + 16

_NONCE = bytes(12)


def seal(shared: bytes, session: bytes, dealer: int, holder: int, shares: tuple[bytes, bytes]) -> bytes:
    """Seal `shares` (of b, of the mask key's seed; 33 bytes each): 82 bytes. Raises `BadShare` for what is no share.

    `shared`: what the two clients' channel keys share, 32 bytes.
    """
    for share in shares:
        share_value(share)
    key, associated = _of_channel(shared, session, dealer, holder)
    return key.encrypt(_NONCE, b"".join(shares), associated)


def open_sealed(shared: bytes, session: bytes, dealer: int, holder: int, sealed: bytes) -> tuple[bytes, bytes]:
    """The shares that `dealer` has sealed for `holder`. Raises `BadShare` if it was not it, or did not seal shares."""
    if len(sealed) != SEALED_BYTES:
        raise BadShare(f"two sealed shares have {SEALED_BYTES} bytes, not {len(sealed)}")
    key, associated = _of_channel(shared, session, dealer, holder)
    try:
        text = key.decrypt(_NONCE, sealed, associated)
    except InvalidTag as error:
        raise BadShare(f"these shares were not sealed by client {dealer} for client {holder}, here") from error
    shares = text[:SHARE_BYTES], text[SHARE_BYTES:]
    for share in shares:
        share_value(share)
    return shares


def _of_channel(shared: bytes, session: bytes, dealer: int, holder: int) -> tuple[AESGCM, bytes]:
    return AESGCM(channel_key(shared, session, dealer, holder)), session + u32(dealer) + u32(holder)
