"""The engine "sequential": trains one client after another on one resident model, with the bits of the SDK's trainer.

Batches and their order, the mean loss, FedProx's term, the codec's projection of gradients, the optimizer and dropout
are those of `client/training/trainer.py` with the client's seed; `tests/sim/engines/test_training.py` compares the
bits. The SDK makes model, optimizer, loader and generators for every client; here they are kept and reset.

On a CPU, models with two-dimensional convolutions are kept in channels-last memory format, and one call takes a step
for all tensors: up to a third faster, and equal within rounding (`arithmetic = "fast"`).
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from itertools import count, islice
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from umbel.aggregation.codec.vector_update import GradientProjections
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.sample_order import sample_order
from umbel.client.local.batches import split_sizes
from umbel.client.local.devices import generators, seeded, set_generators, whole_float32
from umbel.client.local.gradients import GradientRules
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.partition.partition import Indices
from umbel.sim.engines.device import found_device, one_thread, rows_of_block
from umbel.sim.engines.model import ModelRecipe, ResidentModel
from umbel.sim.engines.optimizers import restartable
from umbel.sim.engines.work import Changes, CohortWork, EngineError

Arithmetic = Literal["auto", "sdk", "fast"]
Losses = NDArray[np.float64]


class Draws(Enum):
    """The process-wide generators that a training step draws from: none, torch's, or also Python's or numpy's."""

    NOTHING = "nothing"
    TORCH = "torch"
    OTHERS = "others"


class TrainingStopped(Exception):
    """Training was stopped in the middle of a client."""


class LocalTrainer:
    """Trains clients of a cohort, one after another. Call `begin` first for every cohort.

    `device`: "cpu", "cuda" or "cuda:1". `arithmetic`: "sdk" gives the bits of `TorchClient` in float32, "fast" is
    faster for convolutions, "auto" chooses by the model, so that all engines choose alike.
    """

    def __init__(self, recipe: ModelRecipe, device: str = "cpu", arithmetic: Arithmetic = "auto") -> None:
        self._device, self._arithmetic = found_device(device), arithmetic
        self._loss = recipe.mean_loss()
        self._resident = ResidentModel(recipe.make().to(self._device))
        if not any(p.requires_grad for p in self._resident.module.parameters()):
            raise EngineError(f"the model of {recipe.function} has no parameter to train")
        self._draws: Draws | None = None
        self._is_fast = False
        self._is_stopped = False

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def layout(self) -> Layout:
        return self._resident.layout

    @property
    def draws(self) -> Draws:
        assert self._draws is not None, "begin a cohort first"
        return self._draws

    def begin(self, start: Tensor, work: CohortWork) -> None:
        """Begin a cohort. `start`: float32 in layout order; it must not change until the next cohort begins.

        Raises `EngineError` for work that no engine can do.
        """
        require_trainable(work, start, self.layout)
        self._is_stopped = False
        self._resident.set_start(start)
        if self._draws is None:
            self._look(start, work)
        self._resident.reset()
        module, plan = self._resident.module, work.plan
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._rules = GradientRules()
        pulls = None if work.pulls is None else self._resident.named(work.pulls[0])  # of each client, its own
        within = GradientProjections(work.codec, self.layout)
        self._rules.bind(module, plan.proximal_mu, within, plan.clip_norm, pulls=pulls)
        self._optimizer = restartable(module, plan, is_fused=self._is_fast)

    def train(self, work: CohortWork, positions: Indices, values: Tensor) -> Losses:
        """Train the clients at these positions, and write their changes into `values`: float32 (k, n_values), on the
        CPU.

        Returns the mean, first and last loss of each, (k, 3). `work` may be any part of the cohort. Raises
        `TrainingStopped` after `stop`.
        """
        losses = np.empty((len(positions), 3), dtype=np.float64)
        with self._generators_kept():
            for i, position in enumerate(map(int, positions)):
                with self._from_seed(int(work.seeds[position])):
                    losses[i] = self._train_client(work, position)
                self._resident.write_change(values[i])
        return losses

    def stop(self) -> None:
        """From another thread: end `train` after the current step."""
        self._is_stopped = True

    def _train_client(self, work: CohortWork, position: int) -> tuple[float, float, float]:
        self._resident.reset()
        self._optimizer.restart()
        if work.pulls is not None:
            self._rules.pull_by(self._resident.named(work.pulls[position]))
        samples, rows = self._samples_of(work, position)
        batches = self._batches(rows, work, position)
        total, n_seen = torch.zeros((), device=self._device), 0
        first = last = total
        for number, chosen in enumerate(islice(batches, int(work.steps[position]))):
            for parameter in self._parameters:
                parameter.grad = None
            loss = self._loss_of(samples, chosen)
            loss.backward()
            self._rules.apply(self._resident.module)
            self._optimizer.step()
            last = loss.detach()
            first = last if number == 0 else first
            total = total + last.to(torch.float32) * len(chosen)
            n_seen += len(chosen)
            if self._is_stopped:
                raise TrainingStopped
        return total.item() / n_seen, first.item(), last.item()

    def _loss_of(self, samples: SampleSet, chosen: Tensor) -> Tensor:
        output = self._resident.module(samples.inputs.index_select(0, chosen))
        return self._loss(output, samples.targets.index_select(0, chosen))

    def _samples_of(self, work: CohortWork, position: int) -> tuple[SampleSet, Indices]:
        """Samples on the device, and the rows of the client's own."""
        data = work.data
        if self._device.type == "cpu":
            return data.samples, data.rows[data.starts[position] : data.starts[position + 1]]
        own = data.of(position)
        here = SampleSet(own.inputs.to(self._device), own.targets.to(self._device))
        return here, np.arange(len(own), dtype=np.int64)

    def _batches(self, rows: Indices, work: CohortWork, position: int) -> Iterator[Tensor]:
        """Indices of samples, batch after batch, without end."""
        seed, sizes = int(work.seeds[position]), split_sizes(len(rows), work.plan.batch_size)
        for number in count():
            order = torch.from_numpy(rows[sample_order(seed, number, len(rows))])
            yield from torch.split(order.to(self._device), sizes)

    def _look(self, start: Tensor, work: CohortWork) -> None:
        """Find out by one forward pass which generators the model draws from, and choose its memory format.

        Dropout draws in the order of memory, so a model with dropout keeps its format.
        """
        self._resident.reset()
        samples, rows = self._samples_of(work, 0)
        batch = next(self._batches(rows, work, 0))
        self._draws = draws_of(lambda: self._loss_of(samples, batch), self._device)
        module = self._resident.module
        self._is_fast = self._arithmetic == "fast" or (
            self._arithmetic == "auto"
            and self._draws is Draws.NOTHING
            and _gains_by_channels_last(module, self._device)
        )
        if self._is_fast:
            self._resident = ResidentModel(module.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
            self._resident.set_start(start)

    @contextmanager
    def _generators_kept(self) -> Generator[None]:
        """Restore the caller's generators at the end, with one copy for all clients."""
        if self.draws is not Draws.TORCH:
            yield
            return
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            yield

    @contextmanager
    def _from_seed(self, seed: int) -> Generator[None]:
        match self.draws:
            case Draws.NOTHING:
                yield
            case Draws.TORCH:
                torch.manual_seed(seed)
                yield
            case Draws.OTHERS:
                with seeded(seed, self._device):
                    yield


def require_trainable(work: CohortWork, start: Tensor, layout: Layout) -> None:
    """Raise `EngineError` for work that contradicts itself."""
    n = len(work.data)
    if len(work.seeds) != n or len(work.steps) != n:
        raise EngineError(
            f"{n} clients have {len(work.seeds)} seeds and {len(work.steps)} numbers of steps; each client needs one "
            "seed and one number of steps"
        )
    if n and (int(work.data.sizes.min()) < 1 or int(work.steps.min()) < 1):
        raise EngineError("a client has no samples or no steps; leave such clients out of the cohort")
    if start.shape != (layout.n_values,) or start.dtype != torch.float32:
        raise EngineError(
            f"the start vector is {start.dtype} of shape {list(start.shape)}; the model's state needs "
            f"{layout.n_values} values of float32"
        )


def changes_of(positions: Indices, values: Tensor, losses: Losses) -> Changes:
    """The result of `LocalTrainer.train`."""
    return Changes(positions, values, losses[:, 0], losses[:, 1], losses[:, 2])


def draws_of(forward: Callable[[], object], device: torch.device) -> Draws:
    """The generators that a forward pass draws from. Afterwards they are as they were before."""
    before = generators(device)
    try:
        with torch.no_grad():
            forward()
        after = generators(device)
    finally:
        set_generators(before, device)
    return difference(before, after)


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Draws:
    """The generators that differ between two states."""
    if before["python"] != after["python"] or before["numpy"] != after["numpy"]:
        return Draws.OTHERS
    is_same = all(torch.equal(before[name], after[name]) for name in ("torch", "device") if name in before)
    return Draws.NOTHING if is_same else Draws.TORCH


def _gains_by_channels_last(module: nn.Module, device: torch.device) -> bool:
    """Whether "fast" was measured to be faster for such a model: float32 convolutions on a CPU."""
    is_float32 = all(p.dtype == torch.float32 for p in module.parameters())
    return device.type == "cpu" and is_float32 and any(isinstance(part, nn.Conv2d) for part in module.modules())


class SequentialEngine:
    """Trains on `device`, with one thread; `arithmetic` as for `LocalTrainer`."""

    name = "sequential"

    def __init__(self, recipe: ModelRecipe, device: str = "cpu", arithmetic: Arithmetic = "auto") -> None:
        self._trainer = LocalTrainer(recipe, device, arithmetic)
        n_values = self._trainer.layout.n_values
        self._values = torch.empty(rows_of_block(n_values), n_values)

    @property
    def draws(self) -> Draws:
        """The generators that the model draws from; known once a cohort has begun."""
        return self._trainer.draws

    def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        """As `Engine.train`, in the order of the cohort."""
        self._trainer.begin(start, work)
        for first in range(0, len(work.data), len(self._values)):
            positions = np.arange(first, min(first + len(self._values), len(work.data)))
            with one_thread(), whole_float32(self._trainer.device):
                losses = self._trainer.train(work, positions, self._values)
            yield changes_of(positions, self._values[: len(positions)], losses)

    def close(self) -> None:
        """Nothing is held."""
