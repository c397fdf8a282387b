"""X25519 (RFC 7748), strictly: each public key has one spelling, and none makes the shared secret a constant.

RFC 7748 (section 5) accepts any 32 bytes: it drops bit 255 and reduces modulo p = 2^255 - 19. So two strings can be one
key, and a coordinator could present a client's key as another client's. Here only the integer below p is accepted.
Points of small order are refused (section 6.1 allows it), because with them the secret is always zero.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from umbel.aggregation.secagg.errors import BadKey

KEY_BYTES = 32

_FIELD_PRIME = (1 << 255) - 19
# The u of every point of small order, on the curve and on its twist: doubling, (u^2 - 1)^2 / 4u(u^2 + 486662 u + 1)
# (RFC 7748, section 5, with A = 486662), takes each of them to 0 or to infinity in three steps or fewer.
_SMALL_ORDER_U = frozenset(
    (
        0,  # order 2 (infinity is sent as 0, too)
        1,  # order 4
        _FIELD_PRIME - 1,  # order 4, of the twist
        0x00B8495F16056286FDB1329CEB8D09DA6AC49FF1FAE35616AEB8413B7C7AEBE0,  # order 8
        0x57119FD0DD4E22D8868E1C58C45C44045BEF839C55B1D0B1248C50A3BC959C5F,  # order 8
    )
)


@dataclass(frozen=True, slots=True, eq=False)
class KeyPair:
    """The pair of a `seed` of 32 random bytes; the private key is set up once for many exchanges.

    Raises `ValueError` for a seed of another length.
    """

    seed: bytes = field(repr=False)
    public: bytes = field(init=False)
    _private: X25519PrivateKey = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.seed) != KEY_BYTES:
            raise ValueError(f"a seed must have {KEY_BYTES} bytes, not {len(self.seed)}")
        private = X25519PrivateKey.from_private_bytes(self.seed)
        object.__setattr__(self, "_private", private)
        object.__setattr__(self, "public", private.public_key().public_bytes_raw())

    def shared(self, public: bytes) -> bytes:
        """The 32 bytes shared with the holder of `public`, from which keys are derived. Raises `BadKey`."""
        require_key(public)
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:  # all zeros, which the table above already refuses
            raise BadKey(
                "the secret shared with this key is zero; the key was not made by an X25519 library"
            ) from error


def public_key(seed: bytes) -> bytes:
    """The public key, 32 bytes, of a seed of 32 bytes. Raises `ValueError`."""
    return KeyPair(seed).public


def require_key(public: bytes) -> None:
    """Raise `BadKey` unless these are 32 bytes of a public key in its one spelling, and not of small order."""
    if len(public) != KEY_BYTES:
        raise BadKey(f"an X25519 key must have {KEY_BYTES} bytes, not {len(public)}")
    u = int.from_bytes(public, "little")
    if u >= _FIELD_PRIME:  # bit 255 is set, or u can be written smaller
        raise BadKey("an X25519 key must be a number below 2^255 - 19; make the key with an X25519 library")
    if u in _SMALL_ORDER_U:
        raise BadKey(
            "an X25519 key must not be a point of small order, because every secret shared with it is zero; make the "
            "key with an X25519 library"
        )


def require_keys(publics: Iterable[bytes]) -> None:
    """Raise `BadKey` unless each is a key, and no two are the same, as a roster requires."""
    seen: set[bytes] = set()
    for public in publics:
        require_key(public)
        if public in seen:
            raise BadKey("one key appears twice; each client must make two new keys for each attempt")
        seen.add(public)
