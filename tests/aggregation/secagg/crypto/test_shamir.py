"""Secret sharing: any t shares give the secret, t - 1 fit every secret, and nothing else is taken for a share."""

from collections import Counter
from contextlib import suppress
from fractions import Fraction
from itertools import combinations, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.aggregation.secagg.streams import stream_of
from umbel.aggregation.secagg.crypto.shamir import (
    PRIME,
    Interpolation,
    RandomBytes,
    share_value,
    split,
    split_number,
    uniform_below,
)
from umbel.aggregation.secagg.errors import BadShare, BadSharing, NoSecret

SECRET = bytes(range(32))

# google-parfait/federated-compute, shamir_secret_sharing_test.cc, ReconstructWorksWithPrecomputedShares: of a secret of
# two numbers of 31 bits, five shares, each of two big-endian integers of 32 bits, over p = 2^31 + 11 at the points 1 to
# 5, with a threshold of 3. The secret is 00 00 00 21.
LEGACY_PRIME = (1 << 31) + 11
LEGACY_SHARES = (
    bytes([112, 207, 118, 46, 110, 212, 170, 28]),
    bytes([48, 160, 197, 172, 38, 235, 145, 204]),
    bytes([63, 115, 238, 144, 40, 68, 183, 71]),
    bytes([29, 72, 240, 207, 114, 224, 26, 141]),
    bytes([74, 31, 204, 116, 6, 189, 187, 136]),
)


def only(*numbers: int) -> RandomBytes:
    """A stream of these bytes and no more."""
    rest = bytes(numbers)

    def random(n_bytes: int) -> bytes:
        nonlocal rest
        drawn, rest = rest[:n_bytes], rest[n_bytes:]
        assert len(drawn) == n_bytes, "more was drawn than there is"
        return drawn

    return random


@pytest.mark.parametrize("points", [*combinations(range(1, 6), 3)], ids=str)
def test_the_published_shares_of_google_s_legacy_code(points: tuple[int, ...]) -> None:
    interpolation = Interpolation(points, 3, LEGACY_PRIME)
    limbs = [
        interpolation.number([int.from_bytes(LEGACY_SHARES[x - 1][at : at + 4], "big") for x in points])
        for at in (0, 4)
    ]
    assert limbs == [0, 33]


def test_the_prime_is_prime_and_the_least_above_2_to_the_256() -> None:
    """By Miller and Rabin's test to the first forty primes as bases."""
    bases = [n for n in range(2, 174) if all(n % d for d in range(2, n))]
    assert len(bases) == 40

    def probably_prime(n: int) -> bool:
        twos = (n - 1 & 1 - n).bit_length() - 1
        for base in bases:
            power = pow(base, n - 1 >> twos, n)
            if power in (1, n - 1):
                continue
            for _ in range(twos - 1):
                power = power * power % n
                if power == n - 1:
                    break
            else:
                return False
        return True

    assert [n for n in range((1 << 256) + 1, PRIME + 1, 2) if probably_prime(n)] == [PRIME]


@given(st.data(), st.integers(2, 12), st.binary(min_size=32, max_size=32), st.binary(max_size=8))
def test_any_t_shares_and_any_more_give_the_secret(
    data: st.DataObject, threshold: int, secret: bytes, seed: bytes
) -> None:
    points = data.draw(st.lists(st.integers(1, 1 << 32), min_size=threshold, max_size=15, unique=True))
    shares = dict(zip(points, split(secret, threshold, points, stream_of(seed)), strict=True))
    kept = data.draw(st.permutations(points))[: data.draw(st.integers(threshold, len(points)))]
    assert Interpolation(tuple(kept), threshold).secret([shares[x] for x in kept]) == secret


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32, SECRET], ids=["zero", "greatest", "counting"])
def test_the_secrets_at_the_edges_are_shared(secret: bytes) -> None:
    shares = split(secret, 3, (1, 2, 3, 4), stream_of(b"edges"))
    assert {len(share) for share in shares} == {33}
    for points in combinations((1, 2, 3, 4), 3):
        assert Interpolation(points, 3).secret([shares[x - 1] for x in points]) == secret


def test_fewer_than_t_shares_fit_every_secret_equally_well() -> None:
    """All polynomials of degree 2 over p = 11: what two holders have is distributed the same whatever is shared."""
    views = {
        secret: Counter(
            tuple(split_number(secret, 3, (2, 7, 9), only(a, b), 11)[:2]) for a, b in product(range(11), repeat=2)
        )
        for secret in range(11)
    }
    every = Counter(product(range(11), repeat=2))
    assert all(view == every for view in views.values())


def test_the_coefficients_of_a_large_cohort_are_lagrange_s() -> None:
    points = (3, 5, 11, 300, 9999)
    expected = [prod(Fraction(other, other - x) for other in points if other != x) for x in points]
    interpolation = Interpolation(points, 5)
    for at, fraction in enumerate(expected):
        unit = [int(n == at) for n in range(5)]
        assert interpolation.number(unit) * fraction.denominator % PRIME == fraction.numerator % PRIME


@pytest.mark.parametrize("threshold", [2, 15, 16, 17, 32, 33, 40])
def test_shares_are_the_polynomial_s_values(threshold: int) -> None:
    """Degrees around the steps between which Horner's rule is reduced."""
    points = (1, 2, 1 << 31, PRIME - 1, *range(100, 140))
    coefficients = uniform_below(PRIME, threshold - 1, stream_of(b"values"))
    low_first = [77, *reversed(coefficients)]
    expected = [sum(c * pow(x, power, PRIME) for power, c in enumerate(low_first)) % PRIME for x in points]
    assert split_number(77, threshold, points, stream_of(b"values")) == expected


def test_what_is_not_below_the_prime_is_passed_over_and_not_reduced() -> None:
    assert uniform_below(11, 3, only(10, 11, 15, 0x1A, 0x2B, 3)) == [10, 10, 3]
    low = (5).to_bytes(33, "little")
    top = PRIME.to_bytes(33, "little")
    assert uniform_below(PRIME, 1, only(*top, *low)) == [5]
    assert uniform_below(PRIME, 1, only(*(PRIME - 1).to_bytes(33, "little"))) == [PRIME - 1]
    assert uniform_below(PRIME, 0, only()) == []


def test_coefficients_are_uniform_and_may_be_zero() -> None:
    counts = Counter(uniform_below(11, 11_000, stream_of(b"uniform")))
    assert len(counts) == 11
    assert sum((n - 1000) ** 2 / 1000 for n in counts.values()) < 29.6  # chi-square, 10 degrees, 0.1 %


@pytest.mark.parametrize(
    ("threshold", "points", "words"),
    [
        (1, (1, 2, 3), "threshold of 1"),
        (0, (1, 2, 3), "threshold of 0"),
        (4, (1, 2, 3), "threshold of 4"),
        (2, (), "threshold of 2"),
        (2, (1, 2, 1), "same point"),
        (2, (0, 1, 2), "between 1 and the prime"),
        (2, (1, -2), "between 1 and the prime"),
        (2, (1, PRIME), "between 1 and the prime"),
        (2, (1, PRIME + 1), "between 1 and the prime"),
    ],
)
def test_no_secret_is_shared_or_put_together_over_such_points(
    threshold: int, points: tuple[int, ...], words: str
) -> None:
    with pytest.raises(BadSharing, match=words):
        split(SECRET, threshold, points, stream_of(b""))
    with pytest.raises(BadSharing, match=words):
        Interpolation(points, threshold)


@pytest.mark.parametrize("n_bytes", [0, 31, 33])
def test_a_secret_of_another_length_is_not_shared(n_bytes: int) -> None:
    with pytest.raises(BadSharing, match="32 bytes"):
        split(bytes(n_bytes), 2, (1, 2), stream_of(b""))


@pytest.mark.parametrize("number", [-1, 11, 12])
def test_a_number_that_is_not_of_the_field_is_not_shared(number: int) -> None:
    with pytest.raises(BadSharing, match="below the prime"):
        split_number(number, 2, (1, 2), stream_of(b""), 11)


def test_there_are_as_many_shares_as_points() -> None:
    shares = split(SECRET, 2, (1, 2, 3), stream_of(b""))
    with pytest.raises(BadSharing, match="each point needs one share"):
        Interpolation((1, 2, 3), 2).secret(shares[:2])
    with pytest.raises(BadSharing, match="each point needs one share"):
        Interpolation((1, 2), 2).secret(shares)


@pytest.mark.parametrize("share", [b"", bytes(32), bytes(34), bytes(66)], ids=len)
def test_a_share_of_another_length_is_refused(share: bytes) -> None:
    with pytest.raises(BadShare, match="33 bytes"):
        Interpolation((1, 2), 2).secret([bytes(33), share])


@pytest.mark.parametrize("number", [PRIME, PRIME + 1, (1 << 257), (1 << 264) - 1], ids=hex)
def test_a_share_that_is_not_below_the_prime_is_refused(number: int) -> None:
    with pytest.raises(BadShare, match="below the prime"):
        share_value(number.to_bytes(33, "little"))
    assert share_value((PRIME - 1).to_bytes(33, "little")) == PRIME - 1


@pytest.mark.parametrize("number", [1 << 256, PRIME - 1], ids=hex)
def test_what_has_more_than_32_bytes_is_no_secret(number: int) -> None:
    shares = [value.to_bytes(33, "little") for value in split_number(number, 2, (1, 2), stream_of(b""))]
    with pytest.raises(NoSecret, match="do not restore 32 bytes"):
        Interpolation((1, 2), 2).secret(shares)


def test_only_the_protocol_s_prime_gives_bytes() -> None:
    with pytest.raises(BadSharing, match="another prime"):
        Interpolation((1, 2), 2, LEGACY_PRIME).secret([bytes(33), bytes(33)])


@given(st.integers(0, 2), st.integers(0, 255))
def test_one_changed_share_never_gives_the_secret(at: int, bit: int) -> None:
    shares = list(split(SECRET, 3, (1, 4, 9), stream_of(b"changed")))
    shares[at] = (int.from_bytes(shares[at], "little") ^ 1 << bit).to_bytes(33, "little")
    with suppress(NoSecret, BadShare):
        assert Interpolation((1, 4, 9), 3).secret(shares) != SECRET


def test_the_errors_and_reprs_hold_no_secret() -> None:
    shares = split(SECRET, 2, (1, 2), stream_of(b""))
    interpolation = Interpolation((1, 2), 2)
    assert repr(interpolation) == f"Interpolation(points=(1, 2), threshold=2, prime={PRIME})"
    with pytest.raises(BadShare) as caught:
        interpolation.secret([shares[0], shares[1] + b"\0"])
    assert shares[1].hex() not in str(caught.value)
    assert str(share_value(shares[1])) not in str(caught.value)
