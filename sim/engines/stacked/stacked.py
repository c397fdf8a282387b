"""The engine "batched": many clients' local SGD as one stacked computation, each client with its own weights.

Small models wait for their framework, not for the processor: a step of a few thousand weights is some two hundred
microseconds of bookkeeping. Stacked, a step of hundreds of clients takes about as many calls as a step of one.

Clients are grouped by falling numbers of steps, so that a group's weights fit the caches. A group gives exactly the
bits that each client would give alone (`tests/sim/engines/stacked/test_stacked.py`), with one thread per process. On a
GPU, groups are as large as its memory allows and agree within float32's rounding, because its libraries choose
algorithms by the number of matrices.
"""

import logging
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from umbel.aggregation.codec.vector_update import GradientProjections
from umbel.aggregation.model.layout import Layout
from umbel.client.local.devices import whole_float32
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.partition.partition import Indices
from umbel.sim.engines.device import CPU, found_device, moved, one_thread
from umbel.sim.engines.model import Loss, cross_entropy
from umbel.sim.engines.stacked.dense import dense_chain, train_dense
from umbel.sim.engines.stacked.lockstep import Lockstep, StackedSteps, lockstep, owners, pulls_of, widest_batch
from umbel.sim.engines.stacked.traced import Gradients, stacked_gradients
from umbel.sim.engines.training import require_trainable
from umbel.sim.engines.work import Changes, CohortWork, EngineError

_GROUP_BYTES = 1 << 24  # of weights
_GPU_GROUP_BYTES, _GPU_SHARE = 1 << 30, 16  # share of free memory; gradients, momentum, activations come on top
_BY_LAYER = ("lars", "lamb", "muon")  # optimizers whose step of one weight depends on other weights
_PLACES_MAX = 1 << 22  # of batches that are planned at once
log = logging.getLogger("umbel.sim")


class StackedEngine:
    """`loss`: of each sample. `by_hand`: use the gradients of `dense.py` for chains of linear layers. `device`: "cpu",
    "cuda" or "cuda:1"; the model is moved there. `group_size`: clients trained at once, by default what fits the
    caches.

    Raises `EngineError` if the model holds more than float32 parameters, or there is no such device. Other models that
    cannot be stacked, and optimizers that cannot, are found by the first cohort.
    """

    name = "batched"

    def __init__(
        self, model: nn.Module, loss: Loss = cross_entropy, *, by_hand: bool = True, device: str = "cpu"
    ) -> None:
        self._device, self._loss = found_device(device), loss
        self._model = model.to(self._device)
        self._layout = Layout.of_state(model.state_dict())
        self.group_size = max(1, _group_bytes(self._device) // (4 * self._layout.n_values))
        self._dense = dense_chain(model) if by_hand and loss is cross_entropy else None
        self._gradients = dict[int, Gradients]()  # by the width of a batch
        if self._dense is None:
            _require_stackable(model)

    def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        require_trainable(work, start, self._layout)
        if work.plan.optimizer in _BY_LAYER:
            raise EngineError(
                f'optimizer = "{work.plan.optimizer}" looks at each layer of each client, which is not stacked: '
                'take the engine "sequential", "threads" or "processes"'
            )
        positions = np.argsort(-work.steps, kind="stable")
        width = widest_batch(work.data.sizes, work.plan.batch_size)
        if self._device != CPU:
            start, work = start.to(self._device), moved(work, self._device)
        with one_thread(), whole_float32(self._device):
            for group in self._groups(positions, work.steps, width):
                yield self._train_group(start, work, lockstep(work, group, width))

    def try_out(self, samples: SampleSet) -> None:
        """Raise `EngineError` if a batch of these samples shows that the model cannot be stacked."""
        if self._dense is None:
            with whole_float32(self._device):
                self._gradients_of(samples.inputs.to(self._device), samples.targets.to(self._device))

    def close(self) -> None:
        """Nothing is held."""

    def _groups(self, positions: Indices, steps: Indices, width: int) -> Iterator[Indices]:
        """Groups of clients with few enough weights and places in batches."""
        first, places = 0, 0
        for last, position in enumerate(positions):
            places += int(steps[position]) * width
            if last - first == self.group_size or (places > _PLACES_MAX and last > first):
                yield positions[first:last]
                first, places = last, int(steps[position]) * width
        yield positions[first:]

    def _train_group(self, start: Tensor, work: CohortWork, steps: Lockstep) -> Changes:
        weights = torch.empty(len(steps.positions), self._layout.n_values, device=self._device)
        if self._dense is not None and not GradientProjections(work.codec, self._layout):
            losses = train_dense(self._dense, start, work, steps, weights)
        else:
            losses = self._train_traced(start, work, steps, weights)
        return _changes(weights.sub_(start).cpu(), losses.cpu(), steps)

    def _train_traced(self, start: Tensor, work: CohortWork, steps: Lockstep, weights: Tensor) -> Tensor:
        weights[:] = start
        within = GradientProjections(work.codec, self._layout)
        gradients = torch.empty_like(weights)
        taking = StackedSteps(start, weights, gradients, work.plan, pulls_of(work, steps))
        by_name, gradients_by_name = self._views(weights), self._views(gradients)
        samples, width, done = work.data.samples, steps.width, 0
        losses = torch.empty(int(steps.active.sum()), device=self._device)
        with torch.no_grad():
            for n_active in map(int, steps.active):
                places = slice(done * width, (done + n_active) * width)
                rows = steps.rows[places]
                inputs, targets = samples.inputs.index_select(0, rows), samples.targets.index_select(0, rows)
                found, losses[done : done + n_active] = self._gradients_of(inputs[:width], targets[:width])(
                    {name: one[:n_active] for name, one in by_name.items()},
                    inputs.view(n_active, width, *inputs.shape[1:]),
                    targets.view(n_active, width, *targets.shape[1:]),
                    steps.shares[places].view(n_active, width),
                )
                for name, one in gradients_by_name.items():
                    one[:n_active] = found[name]
                    if name in within:
                        for gradient in one[:n_active]:
                            gradient.copy_(within[name](gradient))
                taking.take(n_active)
                done += n_active
        return losses

    def _gradients_of(self, inputs: Tensor, targets: Tensor) -> Gradients:
        """For batches as wide as this example."""
        width = len(targets)
        if width not in self._gradients:
            self._gradients[width] = stacked_gradients(self._model, self._loss, inputs, targets)
        return self._gradients[width]

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        """By name, the tensors of each client within its row: (m, ...)."""
        return {spec.name: flat[:, spec.place].view(-1, *spec.shape) for spec in self._layout.owners()}


def _group_bytes(device: torch.device) -> int:
    if device == CPU:
        return _GROUP_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return min(_GPU_GROUP_BYTES, free // _GPU_SHARE)


def _require_stackable(model: nn.Module) -> None:
    """Raise `EngineError` for what shows without a trial."""
    if buffers := [name for name, _ in model.named_buffers()]:
        raise EngineError(
            f"{type(model).__name__} cannot be stacked: it has the buffer {buffers[0]!r}, as batch "
            "normalization has; GroupNorm and LayerNorm have no buffers"
        )
    parameters = dict(model.named_parameters())
    if parameters.keys() != model.state_dict().keys():
        raise EngineError(f"{type(model).__name__} cannot be stacked: two of its layers share one tensor")
    for name, parameter in parameters.items():
        if parameter.dtype is not torch.float32 or not parameter.requires_grad:
            raise EngineError(
                f"{type(model).__name__} cannot be stacked: its parameter {name!r} is frozen, or not float32"
            )


def _changes(values: Tensor, losses: Tensor, steps: Lockstep) -> Changes:
    owner = owners(steps.active)
    filled = np.count_nonzero(steps.shares.cpu().numpy().reshape(-1, steps.width), axis=1)
    by_batch = losses.numpy().astype(np.float64)
    n = len(steps.positions)
    mean = np.bincount(owner, by_batch * filled, n) / np.bincount(owner, filled, n)
    n_steps = np.searchsorted(-steps.active, -np.arange(n), side="left")  # of client i
    lasts = (np.cumsum(steps.active) - steps.active)[n_steps - 1] + np.arange(n)
    return Changes(steps.positions, values, mean, by_batch[:n], by_batch[lasts])
