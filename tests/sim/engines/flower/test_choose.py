"""The engine "auto" of Flower apps: a clock decides, and it may take workers back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

pytest.importorskip("flwr", reason="flwr is in the environment of the Flower tests only (make test)")

from flwr.app import MessageType, RecordDict

from umbel.sim.engines.flower import choose
from umbel.sim.engines.flower.choose import AutoNodes
from umbel.sim.engines.flower.work import NodeAnswer, NodeApp, NodeCall, SentContent

APP = NodeApp("folder", "module:app", {}, 10)


@dataclass
class Timed:
    """`seconds`: of a call, by engine; `extra_s`: of an engine's first cohort."""

    here: float
    workers: float
    extra_s: float = 1.0
    now: float = 0.0
    closed: list[str] = field(default_factory=list[str])


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    clock = Timed(here=0.1, workers=0.05)

    class Fake:
        name = ""

        def __init__(self, app: NodeApp, n_workers: int | None = None) -> None:
            self.left_s = clock.extra_s

        def run(self, calls: Sequence[NodeCall]) -> Iterator[tuple[int, NodeAnswer]]:
            clock.now += self.left_s + len(calls) * (clock.here if self.name == "sequential" else clock.workers)
            self.left_s = 0.0
            yield from ((i, NodeAnswer(RecordDict(), b"")) for i in range(len(calls)))

        def close(self) -> None:
            clock.closed.append(self.name)

    monkeypatch.setattr(choose, "SequentialNodes", type("Here", (Fake,), {"name": "sequential"}))
    monkeypatch.setattr(choose, "NodeProcesses", type("Workers", (Fake,), {"name": "processes"}))
    return clock


def calls_of(kind: str) -> list[NodeCall]:
    return [NodeCall(i, SentContent(0, RecordDict()), {"message_type": kind}, 0) for i in range(10)]


def names_of(
    timed: Timed, n_cohorts: int, n_workers: int = 2, kind: str = MessageType.TRAIN
) -> tuple[AutoNodes, list[str]]:
    auto, names, calls = AutoNodes(APP, n_workers, lambda: timed.now), list[str](), calls_of(kind)
    for _ in range(n_cohorts):
        names.append(auto.name)
        assert len([*auto.run(calls)]) == 10
    return auto, names


def test_workers_are_started_when_nodes_have_worked_for_as_long_as_a_start_takes(timed: Timed) -> None:
    """The first cohort imports the app's libraries, and does not count."""
    auto, names = names_of(timed, 12)
    assert names == ["auto", *["sequential"] * 5, *["processes"] * 6]
    assert auto.why == "nodes worked for 5 s, and 2 workers can share that"
    assert timed.closed == []


def test_a_long_first_cohort_is_enough(timed: Timed) -> None:
    timed.here = 1.5
    assert names_of(timed, 3)[1] == ["auto", "processes", "processes"]


def test_workers_that_turn_out_to_be_slower_are_ended_for_good(timed: Timed) -> None:
    timed.workers = 0.2
    auto, names = names_of(timed, 20)
    assert names == ["auto", *["sequential"] * 5, *["processes"] * 4, *["sequential"] * 10]
    assert auto.why == "a node took 1e+02 ms here, and 2e+02 ms with worker processes"
    assert timed.closed == ["processes"]


def test_one_slow_cohort_of_workers_that_are_faster_decides_nothing(timed: Timed) -> None:
    auto, calls = AutoNodes(APP, 2, lambda: timed.now), calls_of(MessageType.TRAIN)
    for number in range(20):
        timed.workers = 0.2 if number == 7 else 0.05
        assert len([*auto.run(calls)]) == 10
    assert auto.name == "processes"


def test_all_kinds_of_messages_are_compared_by_how_often_they_are_sent(timed: Timed) -> None:
    """Workers are slower for a few short calls, and faster for the many long ones."""
    auto = AutoNodes(APP, 2, lambda: timed.now)
    for _ in range(12):
        for kind, n_calls, here, workers in ((MessageType.EVALUATE, 2, 0.01, 0.02), (MessageType.TRAIN, 10, 0.1, 0.05)):
            timed.here, timed.workers = here, workers
            assert len([*auto.run(calls_of(kind)[:n_calls])]) == n_calls
    assert auto.name == "processes"


def test_one_core_or_little_work_needs_no_workers(timed: Timed) -> None:
    assert names_of(timed, 12, n_workers=1)[1] == ["auto", *["sequential"] * 11]
    auto, names = names_of(timed, 4)
    assert names == ["auto", *["sequential"] * 3]
    assert auto.why == "10 nodes worked for 2 s, which worker processes would not make much shorter"
