"""What is remembered of secure rounds outlives the process, whole, and does not grow without end."""

from dataclasses import replace
from pathlib import Path

import pytest

from umbel.aggregation.privacy.accounting import Ledger
from umbel.aggregation.types import AssignmentId, RunId
from umbel.client.errors import StateError
from umbel.client.secure_store import SUMS_MAX, Begun, RememberedSum, SecureStore

RUN = RunId("demo")
COHORT = ("anna", "bert", "cora")


def sum_of(number: int) -> RememberedSum:
    return RememberedSum(f"key {number}", f"{number:032x}", number, "ab" * 32, COHORT)


@pytest.fixture
def store(tmp_path: Path) -> SecureStore:
    return SecureStore(tmp_path)


def test_a_sum_is_remembered_by_its_key_and_there_after_a_restart(tmp_path: Path, store: SecureStore) -> None:
    first = sum_of(1)
    store.remember(RUN, first)
    store.remember(RUN, sum_of(2))
    store.remember(RUN, replace(first, clients=COHORT, is_revealed=True))
    assert SecureStore(tmp_path).sums(RUN) == (replace(first, clients=COHORT, is_revealed=True), sum_of(2))


def test_another_sum_of_the_same_attempt_takes_no_place_but_its_own(store: SecureStore) -> None:
    """The coordinator names attempts, and could name two alike."""
    first, second = replace(sum_of(1), clients=COHORT, is_revealed=True), replace(sum_of(1), key="another")
    store.remember(RUN, first)
    store.remember(RUN, second)
    assert store.sums(RUN) == (first, second)


def test_runs_are_kept_apart_and_can_be_asked_for_together(store: SecureStore) -> None:
    other = RunId("other")
    assert store.sums_of_all_runs() == {}
    store.remember(RUN, sum_of(1))
    assert store.sums(other) == ()
    store.remember(other, sum_of(2))
    assert store.sums_of_all_runs() == {RUN: (sum_of(1),), other: (sum_of(2),)}


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


def test_a_damaged_file_stops_the_client_which_says_when_it_may_be_removed(tmp_path: Path, store: SecureStore) -> None:
    store.remember(RUN, sum_of(1))
    store.begin(Begun(AssignmentId("demo.1.1.anna"), "11" * 16))
    store.spend(RUN, Ledger(1e-6))
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(
        StateError,
        match=r"sums/demo\.json is damaged, and without it this client could help to show by two sums what one of them "
        "hides: remove it once this run has a newer model, then start again$",
    ):
        store.sums(RUN)
    with pytest.raises(
        StateError,
        match=r"begun\.json is damaged, and without it this client could begin an attempt twice: remove it once the "
        "round that is open now is over, then start again$",
    ):
        store.begun()
    with pytest.raises(
        StateError,
        match=r"spent/demo\.json is damaged, and without it this client could spend its privacy twice: remove it once "
        "this run is over, then start again$",
    ):
        store.spent(RUN, 1e-6)
