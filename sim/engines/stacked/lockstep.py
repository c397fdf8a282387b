"""Many clients in step: the samples of each in every step, and a step of SGD for all of them at once.

Clients with more steps come first, so the clients that still train in a step are the first N. Nothing is computed for a
client that has finished.

Torch computes in vectors of about sixteen values and handles the last few one by one; for some functions these two ways
differ in the last bit. A client's values would then depend on how many others are stacked before it. So those functions
are built here from functions for which both ways agree: `tanh`, `exp`, `erf`, and plain arithmetic.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from umbel.aggregation.plans.training import TrainingPlan
from umbel.aggregation.sample_order import Words, epoch_seeds, sample_keys
from umbel.sim.data.partition.partition import Indices
from umbel.sim.engines.optimizers import adam_steps
from umbel.sim.engines.work import CohortWork

_VECTOR = 16  # float32 values that a processor takes at once, at most
_aten = torch.ops.aten


def sigmoid(values: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) = (1 + tanh(x / 2)) / 2."""
    return torch.tanh(values * 0.5).mul_(0.5).add_(0.5)


def whole_vectors(n: int) -> int:
    """n rounded up to whole vectors."""
    return -(-n // _VECTOR) * _VECTOR


def log_softmax(values: Tensor) -> Tensor:
    """`torch.log_softmax` over the last dimension, float32 (..., classes), within rounding.

    Torch handles a row shorter than a vector value by value, seven times as slowly. Such rows are transposed, so that
    the same class of many rows is contiguous, and padded to whole vectors.
    """
    n_classes = values.shape[-1]
    if n_classes >= _VECTOR:
        return torch.log_softmax(values, -1)
    rows = values.reshape(-1, n_classes)
    turned = values.new_zeros(n_classes, whole_vectors(len(rows)))
    turned[:, : len(rows)] = rows.t()
    return torch.log_softmax(turned, 0)[:, : len(rows)].t().contiguous().view(values.shape)


def log_softmax_backward(errors: Tensor, logs: Tensor) -> Tensor:
    """The gradient of `log_softmax`'s input, float32 (..., classes), from that of its output `logs`."""
    if logs.shape[-1] >= _VECTOR:
        return torch._log_softmax_backward_data(errors, logs, logs.ndim - 1, torch.float32)
    return logs.exp().mul_(errors.sum(-1, keepdim=True)).neg_().add_(errors)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """For `make_fx`: replacements of activations and their derivatives."""
    from torch._decomp import get_decompositions

    smooth = (_aten.silu, _aten.elu, _aten.softplus, _aten.gelu, _aten.mish, _aten.hardswish, _aten.log_sigmoid_forward)
    backwards = (
        _aten.silu_backward,
        _aten.elu_backward,
        _aten.softplus_backward,
        _aten.gelu_backward,
        _aten.mish_backward,
        _aten.hardswish_backward,
        _aten.log_sigmoid_backward,
    )
    return {**get_decompositions([*smooth, *backwards]), _aten.sigmoid.default: _sigmoid}


def _sigmoid(values: Tensor) -> Tensor:
    return torch.tanh(values * 0.5) * 0.5 + 0.5


_SORTED_AT_ONCE = 1 << 14  # samples: fits the second-level cache
_PLACE_BITS = 32  # in a key: of the pass and the sample number


def sample_orders(seeds: Words, epochs: Indices, sizes: Indices) -> Indices:
    """`sample_order(seeds[i], epochs[i], sizes[i])` for every i, one after another in one array."""
    starts, ends = epoch_seeds(seeds, epochs), np.cumsum(sizes)
    orders = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    first = done = 0
    while first < len(sizes):
        last = max(first + 1, int(np.searchsorted(ends, done + _SORTED_AT_ONCE, side="right")))
        _sort(starts[first:last], sizes[first:last], orders[done : ends[last - 1]])
        first, done = last, int(ends[last - 1])
    return orders


def _sort(starts: Words, sizes: Indices, out: Indices) -> None:
    """Sort all at once: by pass, then by the upper half of the sample's key, then by its number."""
    index_bits = int(sizes.max()).bit_length()
    assert index_bits + len(sizes).bit_length() <= _PLACE_BITS, "either few passes, or few samples in each"
    firsts = (np.cumsum(sizes) - sizes).astype(np.uint64)
    index = np.arange(len(out), dtype=np.uint64)
    index -= np.repeat(firsts, sizes)
    keys = sample_keys(np.repeat(starts, sizes), index)
    keys >>= np.uint64(32)
    keys <<= np.uint64(index_bits)
    keys |= index
    keys |= np.repeat(np.arange(len(sizes), dtype=np.uint64) << np.uint64(32 + index_bits), sizes)
    keys.sort()
    keys &= np.uint64((1 << index_bits) - 1)
    out[:] = keys.view(np.int64)


@dataclass(frozen=True, slots=True)
class Lockstep:
    """The steps of m clients. `rows` and `shares` go step by step, client by client, on the device of the samples."""

    positions: Indices  # int64 (m,), of the clients in the cohort
    width: int  # places in a batch; some may stay empty
    active: Indices  # int64 (steps,), how many of the m clients take each step
    rows: Tensor  # int64, the sample at each place of a batch; an empty place holds a sample of the same client
    shares: Tensor  # float32, one over the size of the batch; zero for an empty place


def batches_in_pass(sizes: Indices, batch_size: int) -> Indices:
    """How many batches the SDK makes of these numbers of samples: a last batch of one joins the one before."""
    whole = -(-sizes // batch_size)
    return whole - ((sizes > batch_size) & (sizes % batch_size == 1)) if batch_size > 1 else whole


def widest_batch(sizes: Indices, batch_size: int) -> int:
    """The most samples in one batch of any of these clients."""
    has_joined = batch_size > 1 and bool(((sizes > batch_size) & (sizes % batch_size == 1)).any())
    return min(batch_size + has_joined, int(sizes.max()))


def lockstep(work: CohortWork, positions: Indices, width: int) -> Lockstep:
    """The steps of some clients of a cohort, ordered by falling numbers of steps. `width`: of the whole cohort."""
    batch_size, steps = work.plan.batch_size, work.steps[positions]
    assert bool((steps[:-1] >= steps[1:]).all()), "clients with more steps come first"
    sizes, firsts = work.data.sizes[positions], work.data.starts[positions]
    in_pass = batches_in_pass(sizes, batch_size)
    active = np.searchsorted(-steps, -np.arange(int(steps[0])), side="left")
    step_starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(active * width)])

    passes = -(-steps // in_pass)
    owner = np.repeat(np.arange(len(positions)), passes)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(passes) - passes, passes)
    order = sample_orders(work.seeds[positions][owner], number, sizes[owner])

    n = sizes[owner]
    place = np.arange(len(order)) - np.repeat(np.cumsum(n) - n, n)
    of = np.repeat(owner, n)
    batch = np.minimum(place // batch_size, in_pass[of] - 1)
    slot = place - batch * batch_size
    step = batch + np.repeat(number * in_pass[owner], n)
    filled = np.where(batch < in_pass[of] - 1, batch_size, sizes[of] - batch * batch_size)
    if (step >= steps[of]).any():  # the last pass is incomplete
        is_taken = step < steps[of]
        step, slot, of, order, filled = (values[is_taken] for values in (step, slot, of, order, filled))
    where = step_starts[step] + of * width + slot

    shares = np.zeros(int(step_starts[-1]), dtype=np.float32)
    shares[where] = (1 / filled).astype(np.float32)
    rows = np.empty(len(shares), dtype=np.int64)
    rows[where] = work.data.rows[firsts[of] + order]
    empty = np.flatnonzero(shares == 0)
    rows[empty] = work.data.rows[firsts[owners(active)[empty // width]]]
    device = work.data.samples.inputs.device
    on_it = (torch.from_numpy(planned).to(device) for planned in (rows, shares))
    return Lockstep(positions, width, active, *on_it)


def owners(active: Indices) -> Indices:
    """The client of each batch, where `active` clients take each step."""
    return np.arange(int(active.sum())) - np.repeat(np.cumsum(active) - active, active)


_CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def is_plain(work: CohortWork) -> bool:
    """Whether a step is nothing but the gradient times the learning rate."""
    plan = work.plan
    is_sgd = plan.optimizer == "sgd" and not (plan.momentum or plan.weight_decay)
    return is_sgd and not plan.proximal_mu and plan.clip_norm is None and work.pulls is None


def pulls_of(work: CohortWork, steps: Lockstep) -> Tensor | None:
    """The pulls of the clients of these steps, in their order."""
    return None if work.pulls is None else work.pulls[torch.from_numpy(steps.positions).to(work.pulls.device)]


class StackedSteps:
    """The optimizers of a group of clients. `start`: float32 (n,); `weights`, `gradients`, `pulls`: float32 (m, n), the
    caller's, which writes the gradients of the active clients into the first rows.
    """

    def __init__(
        self, start: Tensor, weights: Tensor, gradients: Tensor, plan: TrainingPlan, pulls: Tensor | None = None
    ) -> None:
        self._start, self._weights, self._gradients, self._pulls = start, weights, gradients, pulls
        self._plan = plan
        self._pull = torch.empty_like(weights) if plan.proximal_mu else None
        self._velocity = torch.zeros_like(weights) if plan.momentum else None
        self._moments = [torch.zeros_like(weights) for _ in range(0 if plan.optimizer == "sgd" else 2)]
        self._n_steps = torch.zeros(())  # that the active clients have taken

    def take(self, n_active: int) -> None:
        """Move the first `n_active` rows; the gradients are overwritten."""
        weights, gradients, plan = self._weights[:n_active], self._gradients[:n_active], self._plan
        if self._pull is not None:
            pull = torch.sub(weights, self._start, out=self._pull[:n_active])
            gradients.add_(pull.mul_(plan.proximal_mu))
        if self._pulls is not None:
            gradients.add_(self._pulls[:n_active])
        if plan.clip_norm is not None:
            norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
            gradients.mul_((plan.clip_norm / (norms + _CLIP_EPSILON)).clamp_(max=1.0))
        if self._moments:
            first, second = (moment[:n_active] for moment in self._moments)
            adam_steps(plan, [weights], [gradients], [first], [second], [self._n_steps])
            return
        if plan.weight_decay:
            gradients.add_(weights, alpha=plan.weight_decay)
        if self._velocity is not None:
            gradients = self._velocity[:n_active].mul_(plan.momentum).add_(gradients)
        weights.add_(gradients, alpha=-plan.learning_rate)
