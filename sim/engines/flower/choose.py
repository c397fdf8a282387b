"""Which engine calls the nodes: the one that a file names, or with "auto" the one that suits the app."""

import logging
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

from umbel.aggregation.phrases import counted
from umbel.sim.engines.choose import WORTH_WORKERS_S
from umbel.sim.engines.device import devices_of
from umbel.sim.engines.flower.processes import NodeProcesses
from umbel.sim.engines.flower.sequential import SequentialNodes
from umbel.sim.engines.flower.work import FlowerEngine, NodeAnswer, NodeApp, NodeCall
from umbel.sim.engines.work import EngineError

_FIRST_WORTH_S = 3 * WORTH_WORKERS_S  # of the first cohort, in which the app also imports its libraries
_COMPARED = 3  # cohorts of a kind, before workers have shown how fast they are
log = logging.getLogger("umbel.sim")


def flower_engine(name: str, app: NodeApp, n_workers: int | None) -> FlowerEngine:
    """Raises `EngineError` for an engine that cannot run a Flower app, or an app that cannot be made."""
    match name:
        case "auto":
            return AutoNodes(app, n_workers)
        case "sequential":
            return SequentialNodes(app)
        case "processes":
            return NodeProcesses(app, n_workers)
        case _:
            raise EngineError(f"the engine {name!r} cannot run a Flower app: take auto, sequential or processes")


@dataclass(slots=True)
class _Times:
    """How fast an engine was, by kind of message. The first cohort of each kind does not count: imports and starts are
    in it.
    """

    n_cohorts: dict[str, int] = field(default_factory=dict[str, int])
    call_s: dict[str, float] = field(default_factory=dict[str, float])  # the least mean of a cohort's calls

    def add(self, kind: str, seconds: float, n_calls: int) -> None:
        self.n_cohorts[kind] = n = self.n_cohorts.get(kind, 0) + 1
        if n > 1:
            self.call_s[kind] = min(self.call_s.get(kind, math.inf), seconds / n_calls)

    def mean_s(self, n_calls: Mapping[str, int]) -> float:
        """Of a call, if each kind is called so often."""
        return sum(self.call_s[kind] * n for kind, n in n_calls.items()) / sum(n_calls.values())


class AutoNodes:
    """Calls nodes in this process, until they have taken so long that worker processes are worth their start.

    Workers that turn out to be slower are ended again. All give the same bits, so a clock may decide. `why`: the choice
    in words, empty before the first cohort.
    """

    def __init__(self, app: NodeApp, n_workers: int | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._app, self._n_workers, self._clock = app, n_workers, clock
        self._engine: FlowerEngine = SequentialNodes(app)
        self._here, self._with_workers = _Times(), _Times()
        self._n_calls: dict[str, int] = {}  # of the last cohort of each kind
        self._spent_s = 0.0
        self._is_decided = False
        self.why = ""

    @property
    def name(self) -> str:
        """Of the chosen engine; "auto" before the first cohort."""
        return self._engine.name if self.why else "auto"

    def run(self, calls: Sequence[NodeCall]) -> Generator[tuple[int, NodeAnswer]]:
        began = self._clock()
        yield from self._engine.run(calls)
        if not self._is_decided and calls:
            self._look(str(calls[0].metadata["message_type"]), self._clock() - began, len(calls))

    def close(self) -> None:
        self._engine.close()

    def _look(self, kind: str, taken_s: float, n_calls: int) -> None:
        self._n_calls[kind] = n_calls
        if isinstance(self._engine, NodeProcesses):
            self._with_workers.add(kind, taken_s, n_calls)
            if self._with_workers.n_cohorts[kind] > _COMPARED:
                self._settle()
            return
        is_first, self._spent_s = not self.why, self._spent_s + (taken_s if self.why else 0.0)
        self._here.add(kind, taken_s, n_calls)
        n_workers = len(devices_of("cpu", self._n_workers))
        worked_s = taken_s if is_first else self._spent_s
        if min(n_workers, n_calls) < 2 or worked_s < (_FIRST_WORTH_S if is_first else WORTH_WORKERS_S):
            self.why = self.why or (
                f"{counted(n_calls, 'node')} worked for {taken_s:.2g} s, which worker processes would not make much "
                "shorter"
            )
            return
        self._choose(
            NodeProcesses(self._app, self._n_workers),
            f"nodes worked for {worked_s:.2g} s, and {counted(n_workers, 'worker')} can share that",
        )

    def _settle(self) -> None:
        """Stay with the workers, or end them for good."""
        self._is_decided = True
        known = self._here.call_s.keys() & self._with_workers.call_s.keys()
        if not (n_calls := {kind: n for kind, n in self._n_calls.items() if kind in known}):
            return
        here_s, with_workers_s = self._here.mean_s(n_calls), self._with_workers.mean_s(n_calls)
        if with_workers_s > here_s:
            self._engine.close()
            words = f"a node took {1e3 * here_s:.2g} ms here, and {1e3 * with_workers_s:.2g} ms with worker processes"
            self._choose(SequentialNodes(self._app), words)

    def _choose(self, engine: FlowerEngine, why: str) -> None:
        self._engine, self.why = engine, why
        log.info("engine %s: %s", engine.name, why)
