"""Where engines compute, on the CPU or a GPU, and how a cohort is divided among workers.

The clients with the most steps come first, in ever smaller chunks; each chunk goes to the next idle worker. So the last
worker is done at most one chunk after the mean of all: after the longest client, or a quarter of a worker's share
(Graham 1969, "Bounds on Multiprocessing Timing Anomalies"). What a worker does for one client does not depend on the
others.
"""

import os
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from umbel.aggregation.phrases import counted
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import CohortData
from umbel.sim.engines.work import CohortWork, EngineError

CPU = torch.device("cpu")
_NAME = re.compile(r"cpu|cuda(:(0|[1-9][0-9]?))?")


class NoSuchDevice(ValueError):
    """The name of no device."""


def require_device_name(name: str) -> None:
    """Raise `NoSuchDevice` unless it names a device: "cpu", "cuda", or one GPU of several, "cuda:1"."""
    if not _NAME.fullmatch(name):
        raise NoSuchDevice(f'device must be "cpu", "cuda", or one GPU of several, such as "cuda:1", not {name!r}')


def found_device(name: str) -> torch.device:
    """The device of this name; "cuda" is the first GPU. Raises `EngineError` if torch does not find it."""
    device = torch.device(name)
    if device.type != "cuda":
        return device
    n_gpus = torch.cuda.device_count()
    if n_gpus == 0:
        raise EngineError('torch finds no GPU here; set device = "cpu"')
    number = device.index or 0
    if number >= n_gpus:
        raise EngineError(f'there is no GPU "{name}": torch finds {counted(n_gpus, "GPU")} here; the first is "cuda:0"')
    return torch.device("cuda", number)


def moved(work: CohortWork, device: torch.device) -> CohortWork:
    """The same work with its clients' samples, and no others, on the device."""
    data = work.data
    own = data.samples.take(data.rows)
    samples = SampleSet(own.inputs.to(device), own.targets.to(device))
    pulls = None if work.pulls is None else work.pulls.to(device)
    return replace(work, data=CohortData(samples, np.arange(len(data.rows)), data.starts), pulls=pulls)


@contextmanager
def one_thread() -> Generator[None]:
    """Have torch compute on the calling thread alone inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_BLOCK_BYTES = 1 << 24
_ROWS_MAX = 1024
_CHUNKS_LEFT = 4  # a worker gets a quarter of its share of the remaining work at a time


def rows_of_block(n_values: int) -> int:
    """How many clients' changes fit a block: 16 MiB, and at least one."""
    return max(1, min(_ROWS_MAX, _BLOCK_BYTES // (4 * max(n_values, 1))))


def chunks(steps: Indices, n_workers: int, rows_max: int) -> Iterator[Indices]:
    """Positions of clients in the order in which workers get them: at least one and at most `rows_max` at a time, with
    no more steps than a quarter of a worker's share of the remaining ones. Depends on `steps` alone, not on timing.
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
    """The work of these clients, in this order, over the same samples."""
    data, seeds, steps = work.data.part(positions), work.seeds[positions], work.steps[positions]
    pulls = None if work.pulls is None else work.pulls[torch.from_numpy(positions)]
    return replace(work, data=data, seeds=seeds, steps=steps, pulls=pulls)


def devices_of(device: str, n_workers: int | None) -> list[str]:
    """The device of each worker: the named one, or with "cuda" every GPU in turn. `n_workers` None: one for each core,
    or for each GPU. Raises `EngineError` if there is no such device.
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
