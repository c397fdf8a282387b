"""The device on which an update is encoded: the GPU that holds the trained model, otherwise the CPU.

An update has the same bytes on both (docs/reference/bits.md). On the GPU far fewer bytes are copied to the CPU: of most
codecs only the update's own integers, and never the change as float32 unless the update holds it
(docs/reference/codecs.md, "On a GPU").
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

    Apple's GPUs have no float64, and nobody has compared the bits of AMD's, which torch calls CUDA, too. Models there
    are encoded on the CPU.
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
