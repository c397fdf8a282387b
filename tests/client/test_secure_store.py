"""What is remembered of secure rounds outlives the process, whole, and does not grow without end."""

from dataclasses import replace
from pathlib import Path

import pytest

from umbel.aggregation.types import RunId
from umbel.client.errors import StateError
from umbel.client.secure_store import SUMS_MAX, RememberedSum, SecureStore

RUN = RunId("demo")
COHORT = ("anna", "bert", "cora")


def sum_of(number: int) -> RememberedSum:
    return RememberedSum(f"{number:032x}", number, "ab" * 32, COHORT)


@pytest.fixture
def store(tmp_path: Path) -> SecureStore:
    return SecureStore(tmp_path)


def test_a_sum_is_remembered_by_its_attempt_and_there_after_a_restart(tmp_path: Path, store: SecureStore) -> None:
    first = sum_of(1)
    store.remember(RUN, first)
    store.remember(RUN, sum_of(2))
    store.remember(RUN, replace(first, clients=COHORT, is_revealed=True))
    assert SecureStore(tmp_path).sums(RUN) == (replace(first, clients=COHORT, is_revealed=True), sum_of(2))


def test_runs_are_kept_apart(store: SecureStore) -> None:
    store.remember(RUN, sum_of(1))
    assert store.sums(RunId("other")) == ()


def test_of_more_than_a_hundred_the_oldest_is_forgotten(store: SecureStore) -> None:
    for number in range(1, SUMS_MAX + 4):
        store.remember(RUN, sum_of(number))
    assert [one.round for one in store.sums(RUN)] == list(range(4, SUMS_MAX + 4))


def test_what_was_revealed_is_not_driven_out_by_what_was_not(store: SecureStore) -> None:
    store.remember(RUN, replace(sum_of(1), is_revealed=True))
    for number in range(2, SUMS_MAX + 4):
        store.remember(RUN, sum_of(number))
    assert [one.round for one in store.sums(RUN)] == [1, *range(5, SUMS_MAX + 4)]


def test_only_by_what_was_revealed_later(store: SecureStore) -> None:
    for number in range(1, SUMS_MAX + 1):
        store.remember(RUN, replace(sum_of(number), is_revealed=True))
    store.remember(RUN, sum_of(SUMS_MAX + 1))
    kept = store.sums(RUN)
    assert [one.round for one in kept] == list(range(2, SUMS_MAX + 2)), "the attempt under way is always there"


def test_a_damaged_file_stops_the_client(tmp_path: Path, store: SecureStore) -> None:
    store.remember(RUN, sum_of(1))
    (path,) = tmp_path.glob("sums/*")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(StateError, match=r"demo\.json is damaged, .* remove it once the run is over"):
        store.sums(RUN)
