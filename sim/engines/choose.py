"""Which engine does the work: the one that a file names, or with "auto" the one that suits the model.

Whether clients are stacked depends on the model and not on timing, because stacking rounds differently, and a busy
machine would otherwise change the last bits. Engines that do not stack give equal bits, so among them the choice is by
what the first round costs (`measured.py`). On a GPU, workers share the clients.

Measured on a CPU (docs/explanation/results/simulation.md): bookkeeping dominates where a step of one client is less
than some ten million operations, and stacking saves it. Convolutions are faster one client after another, with a thread
for each core. One client's batches do not fill a GPU, so every model that can be stacked is stacked there.
"""

import logging
import time
from collections.abc import Iterator

from torch import Tensor, nn

from umbel.aggregation.phrases import counted
from umbel.sim.data.partition.partition import Indices
from umbel.sim.engines.clients.app import ClientApp
from umbel.sim.engines.clients.sequential import SequentialClients
from umbel.sim.engines.clients.work import (
    ClientGroup,
    ClientReport,
    ClientsEngine,
    ClientsWork,
    GlobalModel,
    TrainedClients,
)
from umbel.sim.engines.device import CPU, devices_of, found_device
from umbel.sim.engines.measured import MeasuredEngine
from umbel.sim.engines.model import LOSSES, Loss, ModelRecipe
from umbel.sim.engines.stacked.stacked import StackedEngine
from umbel.sim.engines.training import SequentialEngine
from umbel.sim.engines.work import Changes, CohortWork, Engine, EngineError

_STEP_OPERATIONS_MAX = 10_000_000  # of one client's step: forward, and twice that backward
_CHOSEN = ("batched", "sequential", "threads", "processes")  # engines that "auto" may choose
_HEAVY = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
log = logging.getLogger("umbel.sim")


def named_engine(name: str, recipe: ModelRecipe, n_workers: int | None = None, device: str = "cpu") -> Engine:
    """Raises `EngineError` for an engine that cannot train the model or is not installed, or a device not found."""
    match name:
        case "auto":
            return AutoEngine(recipe, n_workers, device)
        case "sequential":
            return SequentialEngine(recipe, device)
        case "batched":
            return stacked_engine(recipe, device)
        case "threads":
            from umbel.sim.engines.workers.threads import ThreadsEngine

            return ThreadsEngine(recipe, n_workers, device)
        case "processes":
            from umbel.sim.engines.workers.processes import ProcessesEngine

            return ProcessesEngine(recipe, n_workers, device)
        case "ray":
            from umbel.sim.engines.workers.ray_engine import RayEngine

            return RayEngine(recipe, n_workers, device)
        case _:
            raise EngineError(f"there is no engine {name!r}")


def named_clients_engine(
    name: str, app: ClientApp, n_alive: int | None, n_workers: int | None, device: str = "cpu"
) -> ClientsEngine:
    """The engine of this name for clients that train themselves. Raises `EngineError` as `named_engine` does."""
    match name:
        case "auto":
            return AutoClients(app, n_alive, n_workers)
        case "sequential":
            return SequentialClients(app, n_alive)
        case "processes":
            from umbel.sim.engines.workers.client_processes import ClientProcesses

            return ClientProcesses(app, n_alive, n_workers)
        case "ray":
            from umbel.sim.engines.workers.ray_clients import RayClients

            return RayClients(app, n_alive, n_workers, device)
        case _:
            raise EngineError(
                f"the engine {name!r} cannot run clients that train themselves: take auto, sequential, processes or ray"
            )


WORTH_WORKERS_S = 5.0  # of a cohort's training: workers import torch and the app first, some seconds


class AutoClients:
    """Runs clients in this process, until a cohort takes so long that worker processes are worth their start.

    Both give the same bits, so a clock may decide. `why`: the choice in words, empty before the first cohort.
    """

    def __init__(self, app: ClientApp, n_alive: int | None, n_workers: int | None) -> None:
        self._app, self._n_alive, self._n_workers = app, n_alive, n_workers
        self._engine: ClientsEngine = SequentialClients(app, n_alive)
        self.why = ""

    @property
    def name(self) -> str:
        """Of the chosen engine; "auto" before the first cohort."""
        return self._engine.name if self.why else "auto"

    def keep(self, name: str) -> None:
        """Run clients with this engine, which did the run's work before it was interrupted."""
        if name in ("sequential", "processes"):
            self._engine = named_clients_engine(name, self._app, self._n_alive, self._n_workers)
            self.why = "it did the run's work before the run was resumed"

    def sizes(self, group: ClientGroup) -> Indices:
        return self._engine.sizes(group)

    def train(self, model: GlobalModel, work: ClientsWork) -> Iterator[TrainedClients]:
        taken_s, results = 0.0, self._engine.train(model, work)
        while True:
            began = time.perf_counter()
            found = next(results, None)
            taken_s += time.perf_counter() - began
            if found is None:
                break
            yield found
        if not self.why:
            self._choose(taken_s, len(work))

    def measure(self, model: GlobalModel, work: ClientsWork) -> list[ClientReport]:
        return self._engine.measure(model, work)

    def close(self) -> None:
        self._engine.close()

    def _choose(self, taken_s: float, n_clients: int) -> None:
        n_workers = len(devices_of("cpu", self._n_workers))
        cost = f"{counted(n_clients, 'client')} trained for {taken_s:.2g} s"
        if self._app.is_only_here:
            self.why = f"{cost}, and worker processes cannot import what makes them"
        elif taken_s < WORTH_WORKERS_S or min(n_workers, n_clients) < 2:
            self.why = f"{cost}, which worker processes would not make much shorter"
        else:
            self.why = f"{cost}, and {counted(n_workers, 'worker')} can share that"
            self._engine.close()
            self._engine = named_clients_engine("processes", self._app, self._n_alive, self._n_workers)
        log.info("engine %s: %s", self._engine.name, self.why)


def stacked_engine(recipe: ModelRecipe, device: str = "cpu") -> StackedEngine:
    """The engine "batched". Raises `EngineError` if the model's tensors or its loss rule it out.

    Obstacles that show only in training are raised by `try_out`, or by the first cohort.
    """
    return StackedEngine(recipe.make(), _each_loss(recipe), device=device)


class AutoEngine:
    """Stacks clients if that is faster, and otherwise trains them another way. Warns if it would stack but cannot."""

    def __init__(self, recipe: ModelRecipe, n_workers: int | None = None, device: str = "cpu") -> None:
        self._recipe, self._n_workers, self._device = recipe, n_workers, device
        self._is_on_gpu = found_device(device) != CPU
        self._engine: Engine | None = None
        self._why = ""

    @property
    def why(self) -> str:
        """The choice in words; empty before the first cohort."""
        return self._engine.why if isinstance(self._engine, MeasuredEngine) else self._why

    def keep(self, name: str) -> None:
        """Train with this engine, which did the run's work before it was interrupted."""
        if name in _CHOSEN:
            self._engine = named_engine(name, self._recipe, self._n_workers, self._device)
            self._why = "it did the run's work before the run was resumed"

    @property
    def name(self) -> str:
        """Of the chosen engine; "auto" before the first cohort."""
        return "auto" if self._engine is None else self._engine.name

    def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        if self._engine is None:
            self._engine = self._chosen(work.plan.batch_size)
        changes = self._engine.train(start, work)
        try:
            first = next(changes)
        except EngineError as error:
            if not isinstance(self._engine, StackedEngine):
                raise
            self._engine = self._without_stacking(error)
            yield from self._engine.train(start, work)
            return
        yield first
        yield from changes

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _chosen(self, batch_size: int) -> Engine:
        model = self._recipe.make()
        n_operations = 6 * batch_size * sum(p.numel() for p in model.parameters())
        if not self._is_on_gpu and any(isinstance(part, _HEAVY) for part in model.modules()):
            return self._unstacked("convolutions and recurrent layers are faster if clients are not stacked")
        if not self._is_on_gpu and n_operations > _STEP_OPERATIONS_MAX:
            why = f"a step of {n_operations / 1e6:.0f} million operations keeps a core busy by itself"
            return self._unstacked(why)
        try:
            engine = stacked_engine(self._recipe, self._device)
        except EngineError as error:
            return self._without_stacking(error)
        small = f"a step of {n_operations / 1e6:.2g} million operations is so short that most of its time is overhead"
        cause = "one client does not fill a GPU" if self._is_on_gpu else small
        self._why = f"{cause}, so clients are trained together (stacked)"
        log.info("engine %s: %s", engine.name, self.why)
        return engine

    def _without_stacking(self, error: EngineError) -> Engine:
        """Another engine for a model that would be stacked, but cannot be."""
        log.warning("clients are not stacked: %s", error)
        return self._unstacked(str(error))

    def _unstacked(self, cause: str) -> Engine:
        n_workers = len(devices_of(self._device, self._n_workers))
        if not self._is_on_gpu:
            return MeasuredEngine(SequentialEngine(self._recipe), self._made, n_workers, cause)
        self._why = cause
        is_alone = n_workers == 1 or self._recipe.is_only_here
        return self._made("sequential" if is_alone else "processes")

    def _made(self, name: str) -> Engine:
        return named_engine(name, self._recipe, self._n_workers, self._device)


def _each_loss(recipe: ModelRecipe) -> Loss:
    """The loss of each sample, which stacking needs. Raises `EngineError` for a loss that is not built in."""
    if (loss := LOSSES.get(recipe.loss)) is None:
        raise EngineError(
            f"the loss {recipe.loss} cannot be stacked, because stacking needs the loss of each sample; these losses "
            f"can be stacked: {', '.join(LOSSES)}"
        )
    return loss
