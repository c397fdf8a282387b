"""Model files on the coordinator's disk: checking what came, and making the next version from a round's sum.

The published file is what clients download; the master copy is the same file, or a second one with half-precision
tensors widened to float32. A commit goes from file to file in pieces: beside the sum it needs a few megabytes, whatever
the model's size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from umbel.aggregation.artifact import layout_of, master_metadata_of, metadata_of
from umbel.aggregation.audit import sum_sha256
from umbel.aggregation.errors import LayoutError
from umbel.aggregation.grid import CHUNK_VALUES
from umbel.aggregation.integer_sum import IntegerSum
from umbel.aggregation.layout import HasMean, Layout, TensorSpec, published, step
from umbel.server.blobs import Blob, BlobStore, model_key
from umbel.server.files import file_sha256
from umbel.server.tensor_file import TensorFile, write_skeleton

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model version's files, of `n_values`. `master_sha256` equals the published one's for models without half
    precision.

    `sum_sha256`: of the exact sum that it was made of, as audit bundles have it. `update_rms`: the mean of the updates'
    root mean squares, where their codec measures it.
    """

    published: Blob
    master_sha256: str
    sum_sha256: str
    n_values: int
    update_rms: float | None = None


@dataclass(frozen=True, slots=True)
class Summed:
    """A round's exact sum, and what its codec makes of it."""

    total: IntegerSum
    mean: HasMean
    update_rms: float | None = None


def inspect_model(path: Path) -> Layout:
    """The layout of a model file that came from outside. Raises `LayoutError` for what no round could start from."""
    try:
        with safe_open(path, framework="pt") as file:  # maps the file; nothing here reads its values
            owned: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            layout = layout_of(file.metadata(), owned)
    except (SafetensorError, json.JSONDecodeError, RecursionError) as error:
        raise LayoutError(f"not a safetensors model: {error}") from error
    if not owned:
        raise LayoutError("the model file holds no tensor")
    _require_finite(path, layout)
    return layout


def keep_model(blobs: BlobStore, path: Path) -> Blob:
    """Store a finished model file under its hash. Blocks for as long as hashing and storing take."""
    blob = Blob(file_sha256(path), path.stat().st_size)
    blobs.put(path, model_key(blob.sha256))
    return blob


def first_master(blobs: BlobStore, model_sha256: str, layout: Layout) -> str:
    """The hash of the master copy of a run's first model, made if it is not the model file itself."""
    if layout.is_master_published:
        return model_sha256
    with blobs.local(model_key(model_sha256)) as given, blobs.scratch() as path:
        _begin(path, layout, is_master=True)
        with TensorFile(given) as start, TensorFile(path, is_writable=True) as master:
            for spec, first, n_values in _pieces(layout):
                values = start.read(spec.name, spec.torch_dtype, first, n_values)
                master.write(spec.name, first, values.to(spec.master_dtype))
        return keep_model(blobs, path).sha256


def next_model(
    blobs: BlobStore, layout: Layout, master_sha256: str, summed: Summed, learning_rate: float
) -> ModelFiles:
    """Store `master + learning_rate * mean` as the next version. The same sum gives the same files.

    Raises `ModelOverflow` for a model that has diverged.
    """
    with blobs.local(model_key(master_sha256)) as before, blobs.scratch() as master, blobs.scratch() as public:
        _begin(public, layout, is_master=False)
        if not layout.is_master_published:
            _begin(master, layout, is_master=True)
        with ExitStack() as files:
            start = files.enter_context(TensorFile(before))
            outputs = [files.enter_context(TensorFile(public, is_writable=True))]
            if not layout.is_master_published:
                outputs.append(files.enter_context(TensorFile(master, is_writable=True)))
            _step_all(layout, start, outputs, summed.mean, learning_rate)
        kept = keep_model(blobs, public)
        master_kept = kept if layout.is_master_published else keep_model(blobs, master)
        return ModelFiles(kept, master_kept.sha256, sum_sha256(summed.total), layout.n_values, summed.update_rms)


def _step_all(
    layout: Layout, start: TensorFile, outputs: Sequence[TensorFile], mean: HasMean, learning_rate: float
) -> None:
    """Read the master copy, step it, and write it out, a piece at a time. `outputs`: published and, if any, master."""
    for spec, first, n_values in _pieces(layout):
        values = start.read(spec.name, spec.master_dtype, first, n_values)
        stepped = step(spec, values, first, mean, learning_rate)
        for output, made in zip(outputs, (published(spec, stepped), stepped), strict=False):
            output.write(spec.name, first, made)


def _pieces(layout: Layout) -> Iterator[tuple[TensorSpec, int, int]]:
    """A model in pieces small enough for memory: tensor, index of the piece's first value in it, number of values."""
    for spec in layout.owners():
        for first in range(0, spec.n_values, CHUNK_VALUES):
            yield spec, first, min(CHUNK_VALUES, spec.n_values - first)


def _begin(path: Path, layout: Layout, is_master: bool) -> None:
    dtypes = {s.name: s.master_dtype if is_master else s.torch_dtype for s in layout.owners()}
    metadata = master_metadata_of(layout) if is_master else metadata_of(layout)
    write_skeleton(path, {s.name: (s.shape, dtypes[s.name]) for s in layout.owners()}, metadata)


def _require_finite(path: Path, layout: Layout) -> None:
    with TensorFile(path) as file:
        for spec, first, n_values in _pieces(layout):
            values = file.read(spec.name, spec.torch_dtype, first, n_values)
            if values.is_floating_point() and not bool(values.isfinite().all()):
                raise LayoutError(
                    f"tensor {spec.name!r} holds a NaN or an infinity; export a model that has not diverged"
                )
