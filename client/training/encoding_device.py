"""The device on which an update is encoded: the GPU that holds the trained model, otherwise the CPU.

An update has the same bytes on both, except with the codec "lowrank" (docs/reference/bits.md). If the GPU encodes, far
fewer bytes are copied to the CPU: with most codecs only the integers of the update. The weight change as float32 is
copied only if the update itself holds it (docs/reference/codecs.md, "On a GPU").
"""

import logging
from collections.abc import Callable
from itertools import chain
from typing import TypeVar

import torch
from torch import nn

T = TypeVar("T")
CPU = torch.device("cpu")
log = logging.getLogger("umbel.client")


def encoding_device(model: nn.Module) -> torch.device:
    """The first CUDA GPU that holds a tensor of the model, or the CPU if none does.

    Apple's GPUs have no float64. AMD's, which torch calls CUDA too, may give other bits: nobody has compared them. So
    updates of models on these GPUs are encoded on the CPU.
    """
    if torch.version.hip is not None:
        return CPU
    devices = (tensor.device for tensor in chain(model.parameters(), model.buffers()))
    return min((one for one in devices if one.type == "cuda"), key=lambda one: one.index, default=CPU)


def where_memory_suffices(make: Callable[[torch.device], T], device: torch.device) -> T:
    """Return `make(device)`, or `make` of the CPU if the GPU has too little free memory.

    `make` may be called a second time after it failed, so it must begin anew.
    """
    if device != CPU:
        try:
            return make(device)
        except torch.OutOfMemoryError as error:
            log.warning("the GPU has too little free memory to encode the update, so the CPU encodes it: %s", error)
    return make(CPU)
