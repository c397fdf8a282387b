"""Where engines compute: on the CPU with one thread, or on a GPU, which holds the model and the samples of a cohort."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from umbel.aggregation.phrases import counted
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.population import CohortData
from umbel.sim.engines.work import CohortWork, EngineError

CPU = torch.device("cpu")
_NAME = re.compile(r"cpu|cuda(:(0|[1-9][0-9]?))?")


class NoSuchDevice(ValueError):
    """A name that is no device's."""


def require_device_name(name: str) -> None:
    """Raise `NoSuchDevice` unless it names a device: "cpu", "cuda", or one GPU of several, "cuda:1"."""
    if not _NAME.fullmatch(name):
        raise NoSuchDevice(f'device must be "cpu", "cuda", or one GPU of several, such as "cuda:1", not {name!r}')


def found_device(name: str) -> torch.device:
    """The device of this name; of "cuda" the first GPU. Raises `EngineError` where torch does not find it here."""
    device = torch.device(name)
    if device.type != "cuda":
        return device
    n_gpus = torch.cuda.device_count()
    if n_gpus == 0:
        raise EngineError('torch finds no GPU here; take device = "cpu"')
    number = device.index or 0
    if number >= n_gpus:
        raise EngineError(f'there is no GPU "{name}": torch finds {counted(n_gpus, "GPU")} here, counted from 0')
    return torch.device("cuda", number)


def moved(work: CohortWork, device: torch.device) -> CohortWork:
    """The same work with the samples of its clients, and no others, on a GPU."""
    data = work.data
    own = data.samples.take(data.rows)
    samples = SampleSet(own.inputs.to(device), own.targets.to(device))
    return replace(work, data=CohortData(samples, np.arange(len(data.rows)), data.starts))


@contextmanager
def whole_float32(device: torch.device) -> Generator[None]:
    """Inside, a GPU multiplies float32 as it is. Else torch rounds what goes into convolutions to 10 bits (TF32)."""
    if device.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    cuda: Any = torch.backends.cuda
    switches = (cudnn.conv, cudnn.rnn, cuda.matmul)
    before = [one.fp32_precision for one in switches]
    try:
        for one in switches:
            one.fp32_precision = "ieee"
        yield
    finally:
        for one, precision in zip(switches, before, strict=True):
            one.fp32_precision = precision


@contextmanager
def one_thread() -> Generator[None]:
    """Inside, torch computes on the calling thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
