"""Model files on the coordinator's disk: checking what came, and making the next version from a round's sum.

The published file is what clients download; the master copy is the same file, or a second one with half-precision
tensors widened to float32. Tensors are read one at a time and written without a copy: a commit needs about one model
beside the sum, whatever the model's size.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from umbel.aggregation.artifact import layout_of, metadata_of
from umbel.aggregation.errors import LayoutError
from umbel.aggregation.grid import CHUNK_VALUES, GridAccumulator
from umbel.aggregation.layout import Layout
from umbel.server.blobs import Blob, BlobStore

_MASTER_KEY = "umbel.master_of"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model version's files. `master_sha256` equals the published one's for models without half precision."""

    published: Blob
    master_sha256: str


class StateFile(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each mapped into memory only while somebody holds it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with safe_open(path, framework="pt") as file:
            self._names = tuple(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def inspect_model(path: Path) -> Layout:
    """The layout of a model file that came from outside. Raises `LayoutError` for what no round could start from."""
    try:
        with safe_open(path, framework="pt") as file:
            owned: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            layout = layout_of(file.metadata(), owned)
    except (SafetensorError, json.JSONDecodeError, RecursionError) as error:
        raise LayoutError(f"not a safetensors model: {error}") from error
    if not owned:
        raise LayoutError("the model file holds no tensor")
    for name, tensor in owned.items():
        _require_finite(name, tensor)
    return layout


def first_master(blobs: BlobStore, model_sha256: str, layout: Layout) -> str:
    """The hash of the master copy of a run's first model, made if it is not the model file itself."""
    if layout.is_master_published:
        return model_sha256
    master = layout.master_of(StateFile(blobs.path(model_sha256)))
    return _write(blobs, master, {_MASTER_KEY: layout.digest}).sha256


def next_model(
    blobs: BlobStore, layout: Layout, master_sha256: str, total: GridAccumulator, learning_rate: float
) -> ModelFiles:
    """Store `master + learning_rate * mean` as the next version. The same sum gives the same files."""
    master = layout.add_mean(StateFile(blobs.path(master_sha256)), total, learning_rate)
    if layout.is_master_published:
        published = _write(blobs, master, metadata_of(layout))
        return ModelFiles(published, published.sha256)
    published = _write(blobs, layout.published(master), metadata_of(layout))
    return ModelFiles(published, _write(blobs, master, {_MASTER_KEY: layout.digest}).sha256)


def _write(blobs: BlobStore, tensors: dict[str, Tensor], metadata: dict[str, str]) -> Blob:
    with blobs.making() as path:
        save_file(tensors, path, metadata)
        return blobs.keep(path)


def _require_finite(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point():
        return
    for piece in torch.split(tensor.reshape(-1), CHUNK_VALUES):
        if not bool(piece.isfinite().all()):
            raise LayoutError(f"tensor {name!r} holds a NaN or an infinity; export a model that has not diverged")
