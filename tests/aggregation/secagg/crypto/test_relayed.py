"""What is relayed between a coordinator's processes: opened by the one it was sealed for, or not at all."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.secagg.crypto.curve import KeyPair
from umbel.aggregation.secagg.crypto.sealed import open_relayed, seal_relayed
from umbel.aggregation.secagg.errors import BadKey, BadShare

OWN, OTHER = KeyPair(b"\1" * 32), KeyPair(b"\2" * 32)
SESSION, MESSAGE = bytes(range(32)), b"one share, and another"


def random(fill: int = 7) -> Callable[[int], bytes]:
    return lambda n_bytes: bytes([fill]) * n_bytes


SEALED = seal_relayed(OWN.public, SESSION, 3, MESSAGE, random())


@given(st.binary(max_size=200), st.integers(0, 2**32 - 1))
def test_the_process_it_is_for_opens_what_was_sealed(message: bytes, index: int) -> None:
    sealed = seal_relayed(OWN.public, SESSION, index, message, random())
    assert len(sealed) == len(message) + 48
    assert open_relayed(OWN, SESSION, index, sealed) == message


def test_the_message_is_not_in_what_is_stored_and_no_two_are_alike() -> None:
    assert MESSAGE not in SEALED
    again = seal_relayed(OWN.public, SESSION, 3, MESSAGE, random(8))
    assert again[:32] != SEALED[:32]
    assert again[32:] != SEALED[32:]


@given(st.integers(0, len(SEALED) * 8 - 1))
def test_every_flipped_bit_is_seen(bit: int) -> None:
    flipped = (int.from_bytes(SEALED, "little") ^ 1 << bit).to_bytes(len(SEALED), "little")
    with pytest.raises(BadShare, match="client 3 was not sealed for this coordinator process"):
        open_relayed(OWN, SESSION, 3, flipped)


@pytest.mark.parametrize(
    ("own", "session", "index"),
    [(OTHER, SESSION, 3), (OWN, SESSION[::-1], 3), (OWN, SESSION, 4)],
    ids=["another process", "another session", "another client"],
)
def test_what_was_sealed_for_another_is_refused(own: KeyPair, session: bytes, index: int) -> None:
    with pytest.raises(BadShare, match="was not sealed for this coordinator process and attempt"):
        open_relayed(own, session, index, SEALED)


@pytest.mark.parametrize("n_bytes", [0, 32, 47])
def test_what_is_too_short_is_refused(n_bytes: int) -> None:
    with pytest.raises(BadShare, match="at least 48 bytes"):
        open_relayed(OWN, SESSION, 3, SEALED[:n_bytes])


@pytest.mark.parametrize("key", [bytes(32), b"\xff" * 32, b"\1" * 31], ids=["small order", "two spellings", "short"])
def test_nothing_is_sealed_to_what_is_no_key(key: bytes) -> None:
    with pytest.raises(BadKey):
        seal_relayed(key, SESSION, 3, MESSAGE, random())
