"""Shamir's secret sharing (How to share a secret, CACM 22(11), 1979) of 32 bytes, over the prime p = 2^256 + 297.

p is the least prime above 2^256. So any 32 bytes are a number of the field, different bytes are different numbers, and
a share takes 33 bytes, little-endian. A secret is the value at zero of a polynomial of degree t - 1 whose other
coefficients are uniform below p; a share is its value at a holder's point. Any t shares give the polynomial; t - 1 fit
every secret equally well.

The time of arithmetic on Python's integers depends on their values. An attacker that measures this process to the
nanosecond may learn something. An attacker at the other end of a network cannot.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod

from umbel.aggregation.secagg.errors import BadShare, BadSharing, NoSecret

RandomBytes = Callable[[int], bytes]
"""Returns that many bytes of a cryptographic generator: `os.urandom`, or in tests a repeatable stream."""

PRIME = (1 << 256) + 297
SECRET_BYTES = 32
SHARE_BYTES = 33

_STEPS_UNREDUCED = (
    16  # of Horner's rule: a point has few bits, so a division at each step would cost more than it saves
)


def split(secret: bytes, threshold: int, points: Sequence[int], random: RandomBytes) -> tuple[bytes, ...]:
    """Share 32 bytes: 33 bytes for each of `points`, in their order. Raises `BadSharing`."""
    if len(secret) != SECRET_BYTES:
        raise BadSharing(f"a secret must have {SECRET_BYTES} bytes, not {len(secret)}")
    values = split_number(int.from_bytes(secret, "little"), threshold, points, random)
    return tuple(value.to_bytes(SHARE_BYTES, "little") for value in values)


def split_number(
    secret: int, threshold: int, points: Sequence[int], random: RandomBytes, prime: int = PRIME
) -> list[int]:
    """Share a number below `prime`: the polynomial's value at each of `points`. Raises `BadSharing`."""
    _require_points(points, threshold, prime)
    if not 0 <= secret < prime:
        raise BadSharing("a secret must be a number from 0 to below the prime")
    highest_first = [*uniform_below(prime, threshold - 1, random), secret]
    steps = range(0, threshold, _STEPS_UNREDUCED)
    groups = [highest_first[first : first + _STEPS_UNREDUCED] for first in steps]
    return [_value_at(point, groups, prime) for point in points]


def uniform_below(bound: int, n: int, random: RandomBytes) -> list[int]:
    """`n` independent numbers, each uniform in 0 .. bound - 1.

    The stream is read in pieces of ceil(b / 8) bytes, little-endian, where b = bound.bit_length(); each gives its
    lowest b bits, and numbers not below `bound` are skipped. A remainder would favour small numbers, and t - 1 shares
    would reveal something about the secret. About half of all numbers of 257 bits are below the prime.
    """
    bits = bound.bit_length()
    n_bytes, lowest = -(-bits // 8), (1 << bits) - 1
    found: list[int] = []
    while missing := n - len(found):
        drawn = random(missing * n_bytes)
        pieces = (drawn[first : first + n_bytes] for first in range(0, len(drawn), n_bytes))
        numbers = (int.from_bytes(piece, "little") & lowest for piece in pieces)
        found.extend(number for number in numbers if number < bound)
    return found


def share_value(share: bytes) -> int:
    """A share as a number. Raises `BadShare` unless it has 33 bytes and lies below the prime."""
    if len(share) != SHARE_BYTES:
        raise BadShare(f"a share must have {SHARE_BYTES} bytes, not {len(share)}")
    value = int.from_bytes(share, "little")
    if value >= PRIME:
        raise BadShare("a share must be a number below the prime 2^256 + 297")
    return value


@dataclass(frozen=True, slots=True)
class Interpolation:
    """Lagrange's coefficients at zero for the holders' `points`, computed once for all their secrets.

    `threshold`: of the sharing; more points than that cost more and give the same result. Raises `BadSharing` for fewer
    points, for a repeated point, and for the point 0.
    """

    points: tuple[int, ...]
    threshold: int
    prime: int = PRIME
    _coefficients: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _require_points(self.points, self.threshold, self.prime)
        object.__setattr__(self, "_coefficients", _at_zero(self.points, self.prime))

    def number(self, values: Sequence[int]) -> int:
        """The polynomial's value at zero, from its values at `points`, in their order. Raises `BadSharing`."""
        if len(values) != len(self.points):
            raise BadSharing(
                f"each point needs one share, but there are {len(self.points)} points and {len(values)} shares"
            )
        return sum(a * b for a, b in zip(self._coefficients, values, strict=True)) % self.prime

    def secret(self, shares: Sequence[bytes]) -> bytes:
        """The 32 bytes that were shared over 2^256 + 297. Raises `BadShare`, `BadSharing` and `NoSecret`.

        Not every changed share is detected: check the result against the dealer's commitment.
        """
        if self.prime != PRIME:
            raise BadSharing(
                "a secret of 32 bytes needs the prime 2^256 + 297; for another prime, call number(), not secret()"
            )
        number = self.number([share_value(share) for share in shares])
        if number.bit_length() > 8 * SECRET_BYTES:
            raise NoSecret("the shares do not restore 32 bytes: a share was changed, or its dealer dealt wrong shares")
        return number.to_bytes(SECRET_BYTES, "little")


def _value_at(point: int, groups: Sequence[Sequence[int]], prime: int) -> int:
    value = 0
    for group in groups:
        for coefficient in group:
            value = value * point + coefficient
        value %= prime
    return value


def _at_zero(points: Sequence[int], prime: int) -> tuple[int, ...]:
    """prod over j != i of x_j / (x_j - x_i), modulo the prime, for each i."""
    numerator = prod(points) % prime
    denominators = [x * prod([other - x for other in points if other != x]) % prime for x in points]
    return tuple(numerator * inverse % prime for inverse in _inverses(denominators, prime))


def _inverses(numbers: Sequence[int], prime: int) -> Iterator[int]:
    """The inverses in order, with one inversion (Montgomery, Speeding the Pollard and elliptic curve methods of
    factorization, Math. Comp. 48, 1987)."""
    before = list(accumulate(numbers, lambda a, b: a * b % prime, initial=1))
    rest, inverses = pow(before.pop(), -1, prime), list[int]()
    for number, product in zip(reversed(numbers), reversed(before), strict=True):
        inverses.append(rest * product % prime)
        rest = rest * number % prime
    return reversed(inverses)


def _require_points(points: Sequence[int], threshold: int, prime: int) -> None:
    if not all(0 < point < prime for point in points):
        raise BadSharing("a holder's point must lie between 1 and the prime: the value at point 0 is the secret itself")
    if len(set(points)) != len(points):
        raise BadSharing("two holders have the same point; each needs its own")
    if not 2 <= threshold <= len(points):  # with 1, each share would be the secret
        raise BadSharing(
            f"a threshold of {threshold} does not fit {len(points)} holders: it must lie between 2 and {len(points)}"
        )
