"""Which samples many clients take in their first step, their second, and so on: all of them in step.

Clients with more steps come first. So those that are still at work in a step are the first so many of them, and
nothing is ever computed for a client that is done.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from umbel.sim.data.partition.partition import Indices
from umbel.sim.engines.orders import sample_orders
from umbel.sim.engines.work import CohortWork


@dataclass(frozen=True, slots=True)
class Lockstep:
    """`positions`: int64 (m,), whose place in the cohort; `width`: places in a batch, of which some may stay empty.

    `active`: int64 (steps,), how many of the m clients take each step. What follows lies step after step, client after
    client: `rows`: int64, for each place of a batch the sample that is in it; `shares`: float32, one over the size of
    the batch, and zero for a place that is empty (which holds a sample of the same client, so that whatever is computed
    of it is the client's own). Both are where the samples are.
    """

    positions: Indices
    width: int
    active: Indices
    rows: Tensor
    shares: Tensor


def batches_in_pass(sizes: Indices, batch_size: int) -> Indices:
    """How many batches the SDK makes of so many samples: a last batch of one joins the one before."""
    whole = -(-sizes // batch_size)
    return whole - ((sizes > batch_size) & (sizes % batch_size == 1)) if batch_size > 1 else whole


def widest_batch(sizes: Indices, batch_size: int) -> int:
    """The most samples in one batch of any of these clients."""
    has_joined = batch_size > 1 and bool(((sizes > batch_size) & (sizes % batch_size == 1)).any())
    return min(batch_size + has_joined, int(sizes.max()))


def lockstep(work: CohortWork, positions: Indices, width: int) -> Lockstep:
    """The steps of some clients of a cohort, who come by falling numbers of steps. `width`: of the whole cohort."""
    batch_size, steps = work.plan.batch_size, work.steps[positions]
    assert bool((steps[:-1] >= steps[1:]).all()), "who has more steps comes first"
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
    if (step >= steps[of]).any():  # the last pass is not gone through to its end
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
    """Whose each batch is, of clients in step of whom so many take each."""
    return np.arange(int(active.sum())) - np.repeat(np.cumsum(active) - active, active)
