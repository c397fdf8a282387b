"""A rank that waits long says for which ranks and for what; the first of those that wait speaks for all."""

import logging
import threading
from collections.abc import Generator
from contextlib import ExitStack
from typing import Any

import pytest
import torch.distributed as dist

from umbel.client.datacenter.ranks.waiting import RankWaits

_PATIENCE_S = 60.0  # of the test
_stores: Any = dist


class _Lines(logging.Handler):
    """Keeps log lines, and wakes the test that waits for some."""

    def __init__(self) -> None:
        super().__init__()
        self.lines, self.came = list[str](), threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.came:
            self.lines.append(record.getMessage())
            self.came.notify_all()

    def wait_for(self, n_lines: int) -> list[str]:
        with self.came:
            assert self.came.wait_for(lambda: len(self.lines) >= n_lines, _PATIENCE_S), "no line came"
            return list(self.lines)


class _CountingStore:
    """A store that knows how often it was asked for a mark."""

    def __init__(self) -> None:
        self.store, self._n_checks, self._asked = _stores.HashStore(), 0, threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        self.store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        with self._asked:
            self._n_checks += 1
            self._asked.notify_all()
        return bool(self.store.check(keys))

    def wait_for_checks(self, n: int) -> None:
        with self._asked:
            assert self._asked.wait_for(lambda: self._n_checks >= n, _PATIENCE_S), "the store was not asked"


@pytest.fixture
def lines() -> Generator[_Lines]:
    log, handler = logging.getLogger("umbel.client"), _Lines()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(before)


def rank(number: int, store: Any, first_s: float) -> RankWaits:
    return RankWaits(number, 4, store, mark_s=0.0, first_s=first_s, every_s=0.01)


def test_the_first_waiting_rank_names_those_that_are_missing(lines: _Lines) -> None:
    store = _stores.HashStore()
    with ExitStack() as waits:
        waits.enter_context(rank(3, store, _PATIENCE_S).told("the reports on round 2"))
        store.wait(["umbel_waits_0_3"])
        waits.enter_context(rank(1, store, 0.01).told("the reports on round 2"))
        first = lines.wait_for(2)[0]
    assert first.startswith("rank 1 has waited ")
    assert first.endswith(" s for the reports on round 2; missing: ranks 0, 2")


def test_a_rank_that_is_not_the_first_says_nothing_and_the_next_wait_has_marks_of_its_own(lines: _Lines) -> None:
    store = _CountingStore()
    first, second = rank(0, store, _PATIENCE_S), rank(1, store, 0.0)
    with first.told("a"):
        store.store.wait(["umbel_waits_0_0"])
        with second.told("a"):
            store.wait_for_checks(9)  # more than one look at the marks of four ranks
    assert not lines.lines
    with second.told("b"):
        (line, *_) = lines.wait_for(1)
    assert line.endswith(" for b; missing: ranks 0, 2, 3")


class _BusyStore:
    """A store whose connection is busy, so that only another connection answers."""

    def __init__(self) -> None:
        self._other = _stores.HashStore()

    def clone(self) -> Any:
        return self._other


def test_a_store_that_is_busy_is_asked_over_another_connection(lines: _Lines) -> None:
    with rank(0, _BusyStore(), 0.0).told("a"):
        assert lines.wait_for(1)[0].endswith("; missing: ranks 1, 2, 3")


def test_a_short_wait_and_a_rank_alone_ask_no_store(lines: _Lines) -> None:
    with RankWaits(0, 2, store=object()).told("a"), RankWaits(0, 1, None, mark_s=0.0, first_s=0.0).told("b"):
        pass
    assert not lines.lines
