"""Whatever bytes a stranger sends, a reader refuses them by `MalformedMessage`, or its value has just these bytes."""

import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.secagg.crypto.sealed import SEALED_BYTES
from umbel.aggregation.secagg.errors import MalformedMessage
from umbel.aggregation.secagg.messages import (
    AdvertiseKeys,
    Dealt,
    Inbox,
    Roster,
    ShareKeys,
    Unmasking,
    decode_agreements,
    decode_indices,
    encode_agreements,
    encode_indices,
    share_keys_bytes,
)

N = 6
NEIGHBOURS = (0, 2, 3, 5)
ME = 1
Again: TypeAlias = Callable[[bytes], bytes]
"""Reads and writes a message."""

READERS: dict[str, Again] = {
    "AdvertiseKeys": lambda data: AdvertiseKeys.decode(data).encode(),
    "Roster": lambda data: Roster.decode(data, N).encode(),
    "ShareKeys": lambda data: ShareKeys.decode(data, ME, NEIGHBOURS).encode(),
    "Inbox": lambda data: Inbox.decode(data, N, NEIGHBOURS).encode(),
    "Inputs": lambda data: encode_indices(decode_indices(data, N)),
    "Agreements": lambda data: encode_agreements(decode_agreements(data, N)),
    "Unmasking": lambda data: Unmasking.decode(data, ME, N).encode(),
}

indices = st.sets(st.integers(0, N - 1)).map(lambda found: tuple(sorted(found)))


def fixed(n_bytes: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=n_bytes, max_size=n_bytes)


def dealt(n_sealed: int = SEALED_BYTES) -> st.SearchStrategy[Dealt]:
    return st.builds(Dealt, fixed(16), fixed(16), fixed(n_sealed))


def advert(index: int) -> st.SearchStrategy[AdvertiseKeys]:
    return st.builds(AdvertiseKeys, st.just(index), fixed(32), fixed(32), fixed(64))


def of_each(clients: tuple[int, ...], value: st.SearchStrategy[bytes]) -> st.SearchStrategy[dict[int, bytes]]:
    return st.fixed_dictionaries(dict.fromkeys(clients, value))


shares = st.fixed_dictionaries({index: dealt(0 if index == ME else SEALED_BYTES) for index in (*NEIGHBOURS, ME)})

GOOD: dict[str, st.SearchStrategy[bytes]] = {
    "AdvertiseKeys": st.integers(0, 2**32 - 1).flatmap(advert).map(AdvertiseKeys.encode),
    "Roster": st.builds(
        Roster, fixed(32), indices.flatmap(lambda some: st.tuples(*(advert(index) for index in some)))
    ).map(Roster.encode),
    "ShareKeys": st.builds(ShareKeys, st.just(ME), fixed(32), shares, fixed(64)).map(ShareKeys.encode),
    "Inbox": indices.flatmap(
        lambda some: st.builds(
            Inbox, st.just(some), st.fixed_dictionaries({one: dealt() for one in some if one in NEIGHBOURS})
        )
    ).map(Inbox.encode),
    "Inputs": indices.map(encode_indices),
    "Agreements": indices.flatmap(lambda some: of_each(some, fixed(64))).map(encode_agreements),
    "Unmasking": indices.flatmap(lambda some: st.builds(Unmasking, st.just(ME), of_each(some, fixed(33)))).map(
        Unmasking.encode
    ),
}


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_a_good_message_is_read_and_written_as_it_was(name: str, data: st.DataObject) -> None:
    message = data.draw(GOOD[name])
    assert READERS[name](message) == message


@pytest.mark.parametrize("name", READERS)
@given(data=st.binary(max_size=700))
def test_any_bytes_are_refused_or_are_written_as_they_were(name: str, data: bytes) -> None:
    with suppress(MalformedMessage):
        assert READERS[name](data) == data


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_a_good_message_that_was_damaged_is_refused_or_is_written_as_it_is(name: str, data: st.DataObject) -> None:
    """A byte changed, some cut off or put in, at whatever place: mostly in its counts and indices."""
    good = data.draw(GOOD[name])
    at = data.draw(st.integers(0, min(len(good), 64)))
    cut = data.draw(st.integers(0, 4))
    damaged = good[:at] + data.draw(st.binary(max_size=4)) + good[at + cut :]
    with suppress(MalformedMessage):
        assert READERS[name](damaged) == damaged


@pytest.mark.parametrize("name", READERS)
@given(data=st.data(), more=st.binary(min_size=1, max_size=200))
def test_a_message_that_goes_on_or_ends_too_early_is_refused(name: str, data: st.DataObject, more: bytes) -> None:
    good = data.draw(GOOD[name])
    with pytest.raises(MalformedMessage):
        READERS[name](good + more)
    with pytest.raises(MalformedMessage):
        READERS[name](good[: -min(len(more), len(good))])


def u32(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def listing(name: str, clients: tuple[int, int]) -> bytes:
    """A message that names these two, and is otherwise well formed."""
    before, width = {"Roster": (u32(2) + bytes(32), 128), "Agreements": (u32(2), 64), "Unmasking": (u32(ME, 2), 33)}[
        name
    ]
    return before + b"".join(u32(client) + bytes(width) for client in clients)


@pytest.mark.parametrize("name", ["Roster", "Agreements", "Unmasking"])
def test_a_list_names_clients_of_the_cohort_in_their_order_each_once(name: str) -> None:
    assert READERS[name](listing(name, (4, 5))) == listing(name, (4, 5))
    for clients in ((5, 4), (4, 4)):
        with pytest.raises(MalformedMessage, match="in ascending order, each once"):
            READERS[name](listing(name, clients))
    with pytest.raises(MalformedMessage, match="lists client 6, but the cohort has 6 clients"):
        READERS[name](listing(name, (4, 6)))


@pytest.mark.parametrize("name", ["Inputs", "Inbox"])
def test_a_set_names_clients_of_the_cohort_in_their_order_each_once(name: str) -> None:
    for clients in ((4, 1), (4, 4), (4, 6)):
        with pytest.raises(MalformedMessage, match=r"must list|lists client"):
            READERS[name](u32(2, *clients))


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("count", [7, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_count_that_lies_costs_nothing(name: str, count: int) -> None:
    """Nothing is set aside for what is only announced: no more than what was sent."""
    data = count.to_bytes(4, "little") * 16384
    tracemalloc.start()
    with pytest.raises(MalformedMessage):
        READERS[name](data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < len(data)


@pytest.mark.parametrize("n_neighbours", [0, 1, 4])
def test_the_length_of_a_share_keys_message_is_known_before_it_is_read(n_neighbours: int) -> None:
    message = ShareKeys(ME, bytes(32), {ME: Dealt(bytes(16), bytes(16), b"")}, bytes(64))
    for index in range(2, 2 + n_neighbours):
        message = ShareKeys(
            ME, bytes(32), {**message.dealt, index: Dealt(bytes(16), bytes(16), bytes(SEALED_BYTES))}, bytes(64)
        )
    assert len(message.encode()) == share_keys_bytes(n_neighbours)


def test_another_clients_message_is_not_taken_for_this_ones() -> None:
    mine = ShareKeys(2, bytes(32), {2: Dealt(bytes(16), bytes(16), b"")}, bytes(64)).encode()
    with pytest.raises(MalformedMessage, match="names another client"):
        ShareKeys.decode(mine, 1, ())
    with pytest.raises(MalformedMessage, match="names another client"):
        Unmasking.decode(Unmasking(2, {}).encode(), 1, N)
