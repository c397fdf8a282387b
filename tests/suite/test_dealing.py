"""Each worker of a run begins with its share of the slow tests, and no test is lost."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.suite.dealing import dealt, first_parts

WORKERS = st.integers(1, 6)
TESTS = st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=200).map(
    lambda tests: sorted(tests, key=lambda test: test[1])  # as they are collected: file by file
)


def parts_of(tests: list[tuple[bool, int]], n_workers: int) -> list[list[int]]:
    """What each worker gets at first."""
    order = dealt([is_slow for is_slow, _ in tests], [file for _, file in tests], n_workers)
    parts = list[list[int]]()
    for size in first_parts(len(order), n_workers):
        parts.append(order[:size])
        order = order[size:]
    assert not order
    return parts


@given(TESTS, WORKERS)
def test_every_test_is_dealt_once(tests: list[tuple[bool, int]], n_workers: int) -> None:
    order = [place for part in parts_of(tests, n_workers) for place in part]
    assert sorted(order) == list(range(len(tests)))


@given(TESTS, WORKERS)
def test_every_worker_begins_with_its_share_of_the_slow_tests(tests: list[tuple[bool, int]], n_workers: int) -> None:
    flags = [[tests[place][0] for place in part] for part in parts_of(tests, n_workers)]
    shares = [sum(part) for part in flags]
    assert max(shares) - min(shares) <= 1
    assert all(part == sorted(part, reverse=True) for part in flags), "slow ones first"


@given(TESTS, WORKERS)
def test_tests_of_one_file_follow_one_another(tests: list[tuple[bool, int]], n_workers: int) -> None:
    """Among a worker's slow tests, and among its fast ones, in the order in which they were collected."""
    for part in parts_of(tests, n_workers):
        for kind in (True, False):
            places = [place for place in part if tests[place][0] is kind]
            assert places == sorted(places)


def test_few_slow_tests_of_one_file_go_to_one_worker() -> None:
    tests = [(True, file) for file in range(6) for _ in range(4)] + [(False, 6)] * 30
    for part in parts_of(tests, 3):
        slow = [tests[place][1] for place in part if tests[place][0]]
        assert len(slow) == 8
        assert len(set(slow)) == 2


def test_many_slow_tests_of_one_file_go_to_every_worker() -> None:
    tests = [(True, 0)] * 100 + [(False, 1)] * 10
    assert [sum(tests[place][0] for place in part) for part in parts_of(tests, 3)] == [33, 33, 34]


class FarWorker:
    """xdist's end of the line to a worker, as far as its scheduler uses it."""

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(id="gw")
        self.shutting_down = False
        self.first: list[int] = []

    def send_runtest_some(self, places: Sequence[int]) -> None:
        self.first += places

    def send_steal(self, places: Sequence[int]) -> None:
        """Never answered here: what comes later is no matter of the first parts."""

    def shutdown(self) -> None:
        self.shutting_down = True


@given(st.integers(0, 300), WORKERS)
def test_the_first_parts_are_those_that_xdist_cuts(n_tests: int, n_workers: int) -> None:
    worksteal: Any = pytest.importorskip("xdist.scheduler.worksteal")
    scheduler = worksteal.WorkStealingScheduling(SimpleNamespace(getvalue=lambda _: [f"{n_workers}*popen"]))
    workers = [FarWorker() for _ in range(n_workers)]
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, [f"test_{place}" for place in range(n_tests)])
    scheduler.schedule()
    assert [len(worker.first) for worker in workers] == first_parts(n_tests, n_workers)
    assert [place for worker in workers for place in worker.first] == [*range(n_tests)], "consecutive"
