"""Model files on disk: written, checked, and changed in place, without a second copy of the model in memory."""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from shutil import copyfile

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from umbel.aggregation.downlink.change import apply_change
from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.artifact import layout_of, metadata_of, tensor_offsets
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import State
from umbel.client.errors import CoordinatorMisbehaved
from umbel.client.files import sync

_PIECE_BYTES = 1 << 18


def write_model(path: Path, state: State, layout: Layout | None = None) -> Layout:
    """Write a state dict as a model file, the same bytes as `encode_model`. Raises `LayoutError`."""
    layout = Layout.of_state(state) if layout is None else layout
    owned = {spec.name: state[spec.name].detach().cpu().contiguous() for spec in layout.owners()}
    save_file(owned, path, metadata_of(layout))
    return layout


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], *, is_durable: bool = True) -> None:
    """Replace a safetensors file. Only its owner may read it. `is_durable`: it survives a loss of power from now on."""
    aside = path.with_suffix(".tmp")
    save_file(tensors, aside, metadata)
    aside.chmod(0o600)
    if is_durable:
        sync(aside)
    aside.replace(path)
    if is_durable:
        sync(path.parent)


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata of a safetensors file, and its tensors, mapped from disk. Raises `SafetensorError`, `OSError`, or
    `KeyError` for a dtype that safetensors knows and torch does not.
    """
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def tensors_sha256(text: str, tensors: State) -> str:
    """Of a text and of tensors with their names, hex: of all that a checkpoint holds, so that one that was changed
    later is refused.
    """
    found = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name]
        found.update(f"\0{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
        found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def tensors_under(prefix: str, tensors: State) -> dict[str, Tensor]:
    """The tensors whose names begin with this prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file. Raises `SafetensorError`, `OSError`."""
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def layout_in(path: Path) -> Layout:
    """The layout of a model file. Raises `LayoutError`, which names the file, if it is no model, and `OSError`."""
    with path.open("rb"):
        pass  # raises OSError for a missing file
    try:
        return layout_of(*read_tensors(path))
    except (SafetensorError, KeyError) as error:
        raise LayoutError(
            f"{path} is not a safetensors model, or is incomplete ({error}): make a model with "
            "`umbel model init --app APP --out FILE`, or copy the file again"
        ) from error
    except LayoutError as error:
        raise LayoutError(f"{path}: {error}") from error


def load_model(path: Path, layout: Layout) -> dict[str, Tensor]:
    """The state dict in a model file, mapped from disk. Raises `CoordinatorMisbehaved` unless it has this layout."""
    try:
        metadata, owned = read_tensors(path)
        found = layout_of(metadata, owned)
    except (SafetensorError, LayoutError, KeyError) as error:
        raise CoordinatorMisbehaved(f"the downloaded model cannot be read: {error}") from error
    if difference := layout.difference(found):
        raise CoordinatorMisbehaved(f"the downloaded model is not the announced one: {difference}")
    return layout.full_state(owned)


def apply_changes(layout: Layout, base: Path, changes: Sequence[Path], out: Path) -> None:
    """Apply the changes to a copy of the model file `base`, of this layout, at `out`.

    Raises an `UpdateRefused` for a malformed change. The caller must check the digest of the result.
    """
    copyfile(base, out)
    model = MappedModel(out)
    for change in changes:
        with change.open("rb", buffering=0) as file:
            apply_change(layout, iter(partial(file.read, _PIECE_BYTES), b""), change.stat().st_size, model)


class MappedModel:
    """The values of a valid safetensors file, read and written in place."""

    def __init__(self, path: Path) -> None:
        self._data = np.memmap(path, np.uint8, "r+")
        n_bytes = int.from_bytes(self._data[:8].tobytes(), "little")
        self._offsets = tensor_offsets(self._data[8 : 8 + n_bytes].tobytes())

    def read(self, name: str, dtype: torch.dtype, first: int, n_values: int) -> Tensor:
        """Values `first` to `first + n_values` of a tensor of `dtype`: one dimension, a copy."""
        copied = np.array(self._data[self._place(name, dtype, first, n_values)])
        return torch.from_numpy(copied).view(dtype)

    def write(self, name: str, first: int, values: Tensor) -> None:
        """Write `values` (one dimension, the tensor's dtype) from value `first` on."""
        place = self._place(name, values.dtype, first, values.numel())
        self._data[place] = values.contiguous().view(torch.uint8).numpy()

    def _place(self, name: str, dtype: torch.dtype, first: int, n_values: int) -> slice:
        start = self._offsets[name] + first * dtype.itemsize
        return slice(start, start + n_values * dtype.itemsize)
