"""The hash that binds a run to its base tensors, which every site has already, such as the frozen base of adapters.

    SHA-256 over, for each tensor in the order of the names:
        the canonical JSON of [name, shape, dtype], its length as 8 bytes little-endian before it,
        then its values in memory order, little-endian

So it changes with any name, shape, dtype or value, and with nothing else. A tied tensor counts under each of its names.
"""

import hashlib
import sys

import torch
from torch import Tensor

from umbel.aggregation.canonical import canonical
from umbel.aggregation.model.layout import PIECE_VALUES
from umbel.aggregation.model.state import State


def base_sha256(base: State) -> str:
    """The hash of these tensors, hex. Memory: one piece beside the tensors."""
    sha = hashlib.sha256()
    for name, tensor in sorted(base.items()):
        head = canonical([name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]).encode()
        sha.update(len(head).to_bytes(8, "little"))
        sha.update(head)
        for piece in torch.split(tensor.detach().reshape(-1), PIECE_VALUES):
            sha.update(_bytes_of(piece))
    return sha.hexdigest()


def _bytes_of(piece: Tensor) -> bytes:
    """The values, little-endian."""
    found = piece.cpu().contiguous().view(torch.uint8).numpy()
    if sys.byteorder == "big":
        found = found.reshape(-1, piece.element_size())[:, ::-1].copy()
    return found.tobytes()
