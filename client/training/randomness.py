"""The process-wide generators that training draws from (dropout, augmentation): seed, save and restore them.

They are torch's for the CPU and for the device in use, Python's and numpy's.
"""

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def seeded(seed: int, device: torch.device) -> Generator[None]:
    """Seed all generators in this block, and restore them after it."""
    before = generators(device)
    try:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        yield
    finally:
        set_generators(before, device)


def generators(device: torch.device) -> dict[str, Any]:
    """The states of all generators, for `set_generators`."""
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
