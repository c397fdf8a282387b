"""What is remembered of secure rounds outlives the process, whole, and does not grow without end."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from umbel.aggregation.privacy.accounting import Ledger
from umbel.aggregation.types import AssignmentId, RunId
from umbel.client.errors import StateError, WorkRefused
from umbel.client.state.secure_store import SUMS_MAX, Begun, RememberedSum, RevealedSums, SecureStore

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


def revealed(number: int, clients: tuple[str, ...] = COHORT) -> RememberedSum:
    return replace(sum_of(number), clients=clients, is_revealed=True)


@pytest.mark.slow
def test_only_by_what_was_revealed_later_and_then_it_is_kept_for_good(tmp_path: Path, store: SecureStore) -> None:
    n_sums = SUMS_MAX + 150
    for number in range(1, n_sums + 1):
        store.remember(RUN, revealed(number, COHORT if number % 7 else COHORT[1:]))
    store.remember(RUN, sum_of(n_sums + 1))
    kept = store.sums(RUN)
    assert [one.round for one in kept] == list(range(152, n_sums + 2)), "the attempt under way is always there"
    found = SecureStore(tmp_path).revealed(RUN)
    assert [one.round for one in found] == list(range(1, n_sums + 1))
    assert found == [revealed(number, COHORT if number % 7 else COHORT[1:]).revealed for number in range(1, n_sums + 1)]
    assert (found[6].clients, found[7].clients, found[7].n_invited) == (COHORT[1:], COHORT, 3)
    assert (tmp_path / "revealed" / "demo.jsonl").stat().st_size / 151 < 200, "bytes a sum"


@pytest.mark.slow
def test_a_state_directory_of_an_older_version_opens_and_loses_nothing(tmp_path: Path, store: SecureStore) -> None:
    """As 0.1 wrote it, full: the newest hundred, in one file."""
    (tmp_path / "sums").mkdir()
    old = [
        f'{{"key":"key {n}","attempt_id":"{n:032x}","round":{n},"model_sha256":"{n:064x}",'
        '"cohort":["anna","bert","cora"],"clients":["anna","bert","cora"],"is_revealed":true}'
        for n in range(1, SUMS_MAX + 1)
    ]
    (tmp_path / "sums" / "demo.json").write_text(f"[{','.join(old)}]")
    before = store.revealed(RUN)
    assert [one.round for one in before] == list(range(1, SUMS_MAX + 1))
    for number in range(SUMS_MAX + 1, 2 * SUMS_MAX + 11):
        store.remember(RUN, revealed(number))
    assert store.revealed(RUN)[:SUMS_MAX] == before


@pytest.mark.slow
def test_where_there_is_no_room_for_more_no_more_rounds_are_taken_and_nothing_is_forgotten(
    tmp_path: Path, store: SecureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator can make up names, where no list is pinned, and sums."""
    for number in range(SUMS_MAX + 2):
        store.remember(RUN, replace(sum_of(number), is_revealed=True))
    store.remember(RunId("other"), sum_of(1))
    n_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*.json*"))
    monkeypatch.setattr("umbel.client.state.secure_store.SUMS_BYTES_MAX", n_bytes)
    store.require_room()
    monkeypatch.setattr("umbel.client.state.secure_store.SUMS_BYTES_MAX", n_bytes - 1)
    with pytest.raises(WorkRefused, match="Name a member list in the policy") as refusal:
        store.require_room()
    assert str(tmp_path) not in refusal.value.public_reason
    assert len(store.revealed(RUN)) == SUMS_MAX + 2


def test_a_crash_while_a_sum_is_put_aside_loses_none(tmp_path: Path, store: SecureStore) -> None:
    for number in range(1, SUMS_MAX + 4):
        store.remember(RUN, revealed(number))
    path, before = tmp_path / "revealed" / "demo.jsonl", store.revealed(RUN)
    for cut in range(1, 40, 13):
        path.write_bytes(path.read_bytes() + b'{"attempt":"aa","round":4,"model":"bb"'[:cut])
        assert store.revealed(RUN) == before
        store.remember(RUN, revealed(SUMS_MAX + 4 + cut))
        before = store.revealed(RUN)
    assert [one.round for one in before][: SUMS_MAX + 3] == list(range(1, SUMS_MAX + 4))


@pytest.mark.slow
@pytest.mark.parametrize("line", ["{", "[1", "7", '{"attempt":"aa"}', "null", "{}"])
def test_a_damaged_archive_stops_the_client(tmp_path: Path, store: SecureStore, line: str) -> None:
    for number in range(1, SUMS_MAX + 4):
        store.remember(RUN, revealed(number))
    path = tmp_path / "revealed" / "demo.jsonl"
    path.write_bytes(line.encode() + b"\n" + path.read_bytes())
    with pytest.raises(StateError, match=r"revealed/demo\.jsonl is damaged; wait until this run is over"):
        store.revealed(RUN)


def test_a_damaged_file_stops_the_client_which_says_when_it_may_be_removed(tmp_path: Path, store: SecureStore) -> None:
    store.remember(RUN, sum_of(1))
    store.begin(RUN, Begun(AssignmentId("demo.1.1.anna"), "11" * 16))
    store.spend(RUN, Ledger(1e-6))
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(
        StateError,
        match=r"sums/demo\.json is damaged; wait until this run has a newer model, then remove the file and "
        "start again. If it is removed earlier, this client could take part in two sums that together reveal one "
        "update$",
    ):
        store.sums(RUN)
    with pytest.raises(
        StateError,
        match=r"begun/demo\.json is damaged; wait until the round that is open now is over, then remove the file and "
        "start again. If it is removed earlier, this client could begin an attempt twice$",
    ):
        store.begun(RUN)
    with pytest.raises(
        StateError,
        match=r"spent/demo\.json is damaged; wait until this run is over, then remove the file and start again. If "
        "it is removed earlier, this client could spend its privacy budget twice$",
    ):
        store.spent(RUN, 1e-6)


def test_an_archived_sum_is_still_known_as_one_of_an_evaluation(tmp_path: Path) -> None:
    archive, sums = RevealedSums(tmp_path / "demo.jsonl"), [revealed(n) for n in (1, 2)]
    trained, measured = sums[0].revealed, replace(sums[1], has_updates=False).revealed
    for one in (trained, measured):
        archive.add(one)
    assert archive.read() == [trained, measured]
    assert [one.has_updates for one in archive.read()] == [True, False]


def test_each_run_has_its_own_last_attempt_and_that_of_an_older_version_counts_for_all(
    tmp_path: Path, store: SecureStore
) -> None:
    (tmp_path / "begun.json").write_text(f'{{"assignment":"demo.1.1.anna","attempt_id":"{"11" * 16}"}}')
    old = Begun(AssignmentId("demo.1.1.anna"), "11" * 16)
    assert (store.begun(RUN), store.begun(RunId("other"))) == (old, old)
    other = Begun(AssignmentId("other.1.1.anna"), "22" * 16)
    store.begin(RunId("other"), other)
    assert (store.begun(RUN), store.begun(RunId("other"))) == (old, other)


def test_runs_that_decide_take_turns(tmp_path: Path, store: SecureStore) -> None:
    """Each thread is as a process of its own: it opens the lock's file anew."""
    inside, most = 0, 0

    def decide() -> None:
        nonlocal inside, most
        for _ in range(20):
            with SecureStore(tmp_path).alone():
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)
                inside -= 1

    threads = [threading.Thread(target=decide) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    with store.alone():
        pass
