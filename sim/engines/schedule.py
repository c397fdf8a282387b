"""How a cohort is dealt out to workers: what takes long first, in ever smaller chunks, to whoever is free.

Each chunk goes to the next worker that has nothing to do. With the longest first this is Graham's greedy rule (1969,
"Bounds on Multiprocessing Timing Anomalies"), at most 4/3 of the best possible time; what a worker does for one client
does not depend on who did the others.
"""

import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from umbel.sim.data.partition.partition import Indices
from umbel.sim.engines.device import found_device
from umbel.sim.engines.work import CohortWork, EngineError

_BLOCK_BYTES = 1 << 24
_ROWS_MAX = 1024
_CHUNKS_LEFT = 4  # of what is left, each worker is given a quarter at a time


def rows_of_block(n_values: int) -> int:
    """How many clients' changes are kept until they are taken: 16 MiB of them, and at least one."""
    return max(1, min(_ROWS_MAX, _BLOCK_BYTES // (4 * max(n_values, 1))))


def chunks(steps: Indices, n_workers: int, rows_max: int) -> Iterator[Indices]:
    """Positions of clients in the order in which they are to be handed out: at most `rows_max` at a time, together no
    more steps than a worker's share of a quarter of what is left, and at least one.

    The same for the same steps, however long they take.
    """
    positions = np.argsort(-steps, kind="stable")
    ends = np.cumsum(steps[positions])
    first, done = 0, 0
    while first < len(positions):
        share = (int(ends[-1]) - done) / (n_workers * _CHUNKS_LEFT)
        last = int(np.searchsorted(ends, done + share, side="right"))
        last = min(max(last, first + 1), first + rows_max)
        yield positions[first:last]
        first, done = last, int(ends[last - 1])


def part_of(work: CohortWork, positions: Indices) -> CohortWork:
    """The work of these clients alone, in this order, over the same samples."""
    clients = work.clients[positions] if len(work.clients) else work.clients
    data, seeds, steps = work.data.part(positions), work.seeds[positions], work.steps[positions]
    return replace(work, data=data, seeds=seeds, steps=steps, clients=clients)


def devices_of(device: str, n_workers: int | None) -> list[str]:
    """The device of each worker: the one that is named, or with "cuda" every GPU by turns.

    `n_workers` None: one for each core, or for each GPU. Raises `EngineError` where there is no such device.
    """
    if n_workers is not None and n_workers < 1:
        raise EngineError(f"there must be at least one worker, not {n_workers}")
    if device == "cpu":
        return [device] * (n_workers or n_cores())
    found_device(device)
    if device != "cuda":
        return [device] * (n_workers or 1)
    n_gpus = torch.cuda.device_count()
    return [f"cuda:{i % n_gpus}" for i in range(n_workers or n_gpus)]


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
