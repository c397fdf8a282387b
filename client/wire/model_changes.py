"""A model file made of one before it and the changes since, in place and in pieces: memory does not follow its size."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import copyfile

import numpy as np
import torch
from torch import Tensor

from umbel.aggregation.downlink.change import apply_change
from umbel.aggregation.model.artifact import tensor_offsets
from umbel.aggregation.model.layout import Layout

_PIECE_BYTES = 1 << 18


def apply_changes(layout: Layout, base: Path, changes: Sequence[Path], out: Path) -> None:
    """Write to `out` what the changes make of the model file `base`, of this layout, one after the other.

    Raises an `UpdateRefused` for what is no change of such a model. What it makes is for the caller to compare.
    """
    copyfile(base, out)
    model = MappedModel(out)
    for change in changes:
        with _pieces(change) as pieces:
            apply_change(layout, pieces, change.stat().st_size, model)


class MappedModel:
    """The values of a good safetensors file, which are written where they stand."""

    def __init__(self, path: Path) -> None:
        self._data = np.memmap(path, np.uint8, "r+")
        n_bytes = int.from_bytes(self._data[:8].tobytes(), "little")
        self._offsets = tensor_offsets(self._data[8 : 8 + n_bytes].tobytes())

    def read(self, name: str, dtype: torch.dtype, first: int, n_values: int) -> Tensor:
        """Values `first` to `first + n_values` of a tensor of `dtype`: one dimension, a copy."""
        copied = np.array(self._data[self._place(name, dtype, first, n_values)])
        return torch.from_numpy(copied).view(dtype)

    def write(self, name: str, first: int, values: Tensor) -> None:
        """Put `values` (one dimension, the tensor's dtype) in the place of values `first` and following."""
        place = self._place(name, values.dtype, first, values.numel())
        self._data[place] = values.contiguous().view(torch.uint8).numpy()

    def _place(self, name: str, dtype: torch.dtype, first: int, n_values: int) -> slice:
        start = self._offsets[name] + first * dtype.itemsize
        return slice(start, start + n_values * dtype.itemsize)


@contextmanager
def _pieces(path: Path) -> Generator[Generator[bytes]]:
    with path.open("rb", buffering=0) as file:
        yield (piece for piece in iter(lambda: file.read(_PIECE_BYTES), b""))
