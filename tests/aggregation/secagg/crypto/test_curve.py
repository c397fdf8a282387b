"""X25519 by the published vectors, and every key that the protocol must not take."""

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from tests.aggregation.secagg.published import LOW_ORDER, LOW_ORDER_PRIVATE, NON_CANONICAL, TAKEN, Exchange
from umbel.aggregation.secagg.crypto import curve
from umbel.aggregation.secagg.crypto.curve import KeyPair, public_key, require_key, require_keys
from umbel.aggregation.secagg.errors import BadKey

P = (1 << 255) - 19
A = 486662  # of curve25519: v^2 = u^3 + A u^2 + u

seeds = st.binary(min_size=32, max_size=32)


def shared_secret(seed: bytes, public: bytes) -> bytes:
    return KeyPair(seed).shared(public)


def encoded(u: int) -> bytes:
    return u.to_bytes(32, "little")


def by_number(case: Exchange) -> str:
    return f"case {case.number}"


def test_the_two_parties_of_rfc_7748_section_6_1() -> None:
    alice = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    shared = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert public_key(alice).hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    assert public_key(bob).hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    assert shared_secret(alice, public_key(bob)).hex() == shared
    assert shared_secret(bob, public_key(alice)).hex() == shared


def test_the_iterations_of_rfc_7748_section_5_2() -> None:
    u = scalar = bytes.fromhex("0900000000000000000000000000000000000000000000000000000000000000")
    after = {
        1: "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079",
        1000: "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51",
    }
    for iteration in range(1, 1001):
        scalar, u = shared_secret(scalar, u), scalar
        if iteration in after:
            assert scalar.hex() == after[iteration]


def test_the_first_vector_of_rfc_7748_section_5_2_and_the_second_whose_key_has_bit_255_set() -> None:
    scalar = bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    u = bytes.fromhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    out = "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"
    assert shared_secret(scalar, u).hex() == out
    scalar = bytes.fromhex("4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d")
    u = bytes.fromhex("e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493")
    with pytest.raises(BadKey, match=r"below 2\^255 - 19"):
        shared_secret(scalar, u)
    out = "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957"
    assert shared_secret(scalar, u[:31] + bytes([u[31] & 0x7F])).hex() == out


@pytest.mark.parametrize("case", TAKEN, ids=by_number)
def test_the_cases_of_wycheproof_whose_keys_are_taken(case: Exchange) -> None:
    assert shared_secret(bytes.fromhex(case.private), bytes.fromhex(case.public)).hex() == case.shared


@pytest.mark.parametrize("number", LOW_ORDER, ids=lambda number: f"case {number}")
def test_keys_of_small_order_are_refused(number: int) -> None:
    public = bytes.fromhex(LOW_ORDER[number])
    with pytest.raises(BadKey):
        require_key(public)
    with pytest.raises(BadKey):
        shared_secret(bytes.fromhex(LOW_ORDER_PRIVATE), public)
    with pytest.raises(ValueError, match="Error computing shared key"):  # what the library says of a zero
        X25519PrivateKey.from_private_bytes(bytes.fromhex(LOW_ORDER_PRIVATE)).exchange(
            X25519PublicKey.from_public_bytes(public)
        )


@pytest.mark.parametrize("number", [32, 33, 63, 64, 65], ids=lambda number: f"case {number}")
def test_each_point_of_small_order_in_its_one_spelling_is_refused_as_such(number: int) -> None:
    with pytest.raises(BadKey, match="small order"):
        require_key(bytes.fromhex(LOW_ORDER[number]))


def test_these_are_all_points_of_small_order() -> None:
    """By the division polynomials: u is of order 2, 4 or 8 where doubling leads to (0, 0) in at most two steps.

    Doubling takes u to (u^2 - 1)^2 / 4u(u^2 + A u + 1). It gives 0 for u = 1 and -1, infinity for u = 0 (and for the
    roots of u^2 + A u + 1, if A^2 - 4 were a square), 1 where (u - 1)^4 = 4 u^2 (A + 2), and -1 where
    (u + 1)^4 = 4 u^2 (2 - A): two quadratics each, and of these four only one has roots.
    """
    assert pow(A * A - 4, (P - 1) // 2, P) == P - 1

    def root(square: int) -> int | None:
        """A square root modulo p, which is 5 modulo 8 (RFC 8032, 5.1.3)."""
        found = pow(square, (P + 3) // 8, P)
        for one in (found, found * pow(2, (P - 1) // 4, P) % P):
            if one * one % P == square % P:
                return one
        return None

    small = {0, 1, P - 1}
    for shift, radicand in ((-1, A + 2), (1, 2 - A)):
        half = root(radicand)
        for r in () if half is None else (half, P - half):
            # (u + shift)^2 = 2 r u: u^2 + 2 (shift - r) u + 1 = 0
            if (middle := root((r - shift) ** 2 - 1)) is not None:
                small |= {(r - shift + middle) % P, (r - shift - middle) % P}
    assert {encoded(u).hex() for u in small} == {LOW_ORDER[number] for number in (32, 33, 63, 64, 65)}


@pytest.mark.parametrize("case", NON_CANONICAL, ids=by_number)
def test_a_second_spelling_of_a_key_is_refused_for_it_shares_the_same_secret(case: Exchange) -> None:
    alias, private = bytes.fromhex(case.public), bytes.fromhex(case.private)
    with pytest.raises(BadKey, match=r"below 2\^255 - 19"):
        require_key(alias)
    own = encoded((int.from_bytes(alias, "little") & ((1 << 255) - 1)) % P)
    assert shared_secret(private, own).hex() == case.shared


@given(seeds)
def test_a_key_with_bit_255_set_is_refused(seed: bytes) -> None:
    public = public_key(seed)
    with pytest.raises(BadKey, match=r"below 2\^255 - 19"):
        require_key(public[:31] + bytes([public[31] | 0x80]))


@pytest.mark.parametrize("n_bytes", [0, 31, 33, 64])
def test_a_key_of_another_length_is_refused(n_bytes: int) -> None:
    with pytest.raises(BadKey, match="32 bytes"):
        require_key(bytes([9]) * n_bytes)


@given(seeds, seeds)
def test_both_ends_share_the_same_secret_however_often_they_are_asked(one: bytes, other: bytes) -> None:
    pair = KeyPair(one)
    assert pair.public == public_key(one)
    shared = pair.shared(public_key(other))
    assert shared == pair.shared(public_key(other)) == shared_secret(other, pair.public)


def test_a_secret_of_zero_is_refused_even_if_no_table_knows_the_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "_SMALL_ORDER_U", frozenset[int]())
    for number in (32, 33, 63, 64, 65):
        with pytest.raises(BadKey, match="is zero"):
            shared_secret(bytes(range(32)), bytes.fromhex(LOW_ORDER[number]))


def test_a_seed_is_not_shown_and_has_32_bytes() -> None:
    seed = bytes(range(100, 132))
    assert seed.hex() not in repr(KeyPair(seed))
    assert repr(seed) not in repr(KeyPair(seed))
    assert "private" not in repr(KeyPair(seed))
    for n_bytes in (0, 31, 33):
        with pytest.raises(ValueError, match=f"32 bytes, not {n_bytes}"):
            KeyPair(bytes(n_bytes))


def test_no_key_stands_twice_in_a_roster() -> None:
    publics = [public_key(bytes([n]) * 32) for n in range(4)]
    require_keys(publics)
    with pytest.raises(BadKey, match="twice"):
        require_keys([*publics, publics[2]])
    with pytest.raises(BadKey, match=r"below 2\^255 - 19"):
        require_keys([*publics, publics[2][:31] + bytes([publics[2][31] | 0x80])])
