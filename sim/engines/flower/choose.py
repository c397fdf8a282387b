"""Which engine calls the nodes: the one that a file names, or with "auto" the one that suits the app."""

import logging
import time
from collections.abc import Iterator, Sequence

from umbel.aggregation.phrases import counted
from umbel.sim.engines.choose import WORTH_WORKERS_S
from umbel.sim.engines.device import devices_of
from umbel.sim.engines.flower.processes import NodeProcesses
from umbel.sim.engines.flower.sequential import SequentialNodes
from umbel.sim.engines.flower.work import FlowerEngine, NodeAnswer, NodeApp, NodeCall
from umbel.sim.engines.work import EngineError

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


class AutoNodes:
    """Calls nodes in this process, until a cohort takes so long that worker processes are worth their start.

    Both give the same bits, so a clock may decide. `why`: the choice in words, empty before the first cohort.
    """

    def __init__(self, app: NodeApp, n_workers: int | None) -> None:
        self._app, self._n_workers = app, n_workers
        self._engine: FlowerEngine = SequentialNodes(app)
        self.why = ""

    @property
    def name(self) -> str:
        """Of the chosen engine; "auto" before the first cohort."""
        return self._engine.name if self.why else "auto"

    def run(self, calls: Sequence[NodeCall]) -> Iterator[tuple[int, NodeAnswer]]:
        began = time.perf_counter()
        yield from self._engine.run(calls)
        if not self.why:
            self._choose(time.perf_counter() - began, len(calls))

    def close(self) -> None:
        self._engine.close()

    def _choose(self, taken_s: float, n_calls: int) -> None:
        n_workers = len(devices_of("cpu", self._n_workers))
        cost = f"{counted(n_calls, 'node')} worked for {taken_s:.2g} s"
        if taken_s < WORTH_WORKERS_S or min(n_workers, n_calls) < 2:
            self.why = f"{cost}, which worker processes would not make much shorter"
        else:
            self.why = f"{cost}, and {counted(n_workers, 'worker')} can share that"
            self._engine = NodeProcesses(self._app, self._n_workers)
        log.info("engine %s: %s", self._engine.name, self.why)
