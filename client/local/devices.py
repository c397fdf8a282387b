"""The device and the precision of training, and the process-wide generators that it draws from."""

import random
from collections import deque
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Literal

import numpy as np
import torch

Precision = Literal["auto", "float32", "bfloat16", "float16"]


def pick_device(asked: str) -> torch.device:
    """`auto`: the first CUDA GPU, else Apple's, else the CPU."""
    if asked != "auto":
        return torch.device(asked)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def pick_precision(asked: Precision, device: torch.device) -> torch.dtype:
    """The type of the forward pass. `auto`: bfloat16 on GPUs that have it, float16 on others; float32 elsewhere."""
    if asked == "auto":
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[asked]


def autocast(device: torch.device, precision: torch.dtype) -> AbstractContextManager[object]:
    """Mixed precision, or nothing for float32."""
    return nullcontext() if precision == torch.float32 else torch.autocast(device.type, dtype=precision)


class Pace:
    """Keeps the CPU at most two steps ahead of a GPU, so that the time between two steps shows how fast the GPU is."""

    def __init__(self, device: torch.device) -> None:
        self._events: deque[torch.cuda.Event] | None = deque() if device.type == "cuda" else None

    def step_queued(self) -> None:
        if self._events is None:
            return
        event = torch.cuda.Event()
        event.record()
        self._events.append(event)
        if len(self._events) > 2:
            self._events.popleft().synchronize()


@contextmanager
def whole_float32(device: torch.device) -> Generator[None]:
    """Multiply in full float32 in this block. By default torch rounds inputs of convolutions on a GPU to 10 bits."""
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
def seeded(seed: int, device: torch.device) -> Generator[None]:
    """Seed all generators in this block, and restore them after it: torch's for the CPU and for the device in use,
    Python's and numpy's. Dropout and augmentation draw from them.
    """
    before = generators(device)
    try:
        seed_generators(seed)
        yield
    finally:
        set_generators(before, device)


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def seed_generators(seed: int) -> None:
    """Seed torch's, Python's and numpy's generators."""
    if _has_accelerator():
        torch.manual_seed(seed)
    else:  # the same, without the half millisecond in which torch notes a stack trace for each kind of device it lacks
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def generators(device: torch.device) -> dict[str, Any]:
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}},
    }
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["device"] = torch.mps.get_rng_state()
    return state


def set_generators(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    key = np.array(state["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state({**state["numpy"], "state": {**state["numpy"]["state"], "key": key}})
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)
    elif device.type == "mps":
        torch.mps.set_rng_state(state["device"])
