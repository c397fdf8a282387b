"""The time of a collective, or of anything else that all ranks do together: medians, after a warm-up."""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from umbel.client.datacenter.ranks.group import Group, lost_ranks_named

_WARM_UPS, _LEAST, _MOST = 2, 3, 25


def time_of(group: Group, work: Callable[[], object], budget_s: float, *, apart: bool = False) -> float:
    """The median seconds of `work`, which all ranks do together, on the slowest rank; the same number on every rank.

    `budget_s`: for all times together; it is done three times at least. It is done again and again without a pause, so
    that no rank counts the time for which it waits for another one to begin. `apart`: with a barrier before each, for
    work that some ranks can begin again before others have ended it.
    """
    first = min(agreed_time(group, _timed(group, work, apart)) for _ in range(_WARM_UPS))
    n = min(_MOST, max(_LEAST, int(budget_s / max(first, 1e-6))))
    return agreed_time(group, median([_timed(group, work, apart) for _ in range(n)]))


def agreed_time(group: Group, seconds: float) -> float:
    """The longest of all ranks' times."""
    longest = torch.tensor([seconds], dtype=torch.float64, device=group.wire)
    with lost_ranks_named():
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=group.process_group)
    return float(longest)


def settle(device: torch.device) -> None:
    """Wait for what a GPU has been told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(group: Group) -> float:
    """A clock in seconds, read after all that the GPU of this rank has been told to do."""
    settle(group.wire)
    return time.perf_counter()


def _timed(group: Group, work: Callable[[], object], apart: bool) -> float:
    with lost_ranks_named():
        if apart:
            dist.barrier(group.process_group)
        began = now(group)
        work()
    return now(group) - began
