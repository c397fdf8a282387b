"""Choose the device and the precision of training."""

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

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
    """Keeps the CPU at most two steps ahead of a GPU, so that a clock read between steps means something."""

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
