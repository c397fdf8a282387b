"""Model files: checked when they are uploaded, and made from a round's sum.

Clients download the published file. The master copy is a second file if the model has half-precision tensors, which it
holds as float32, or if clients download changes, because then the published model follows it in steps. Otherwise one
file is both. A commit works from file to file in pieces: beside the sum it needs a few megabytes, for any model size.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from umbel.aggregation.downlink.change import HEAD_BYTES, ChangeWriter
from umbel.aggregation.downlink.publishing import write_next_master
from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.artifact import layout_of, master_metadata_of, metadata_of, tensor_offsets
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.next_model import HasMean, ServerStep, master_tensors, write_first, write_next
from umbel.aggregation.model.state import master_dtype, pieces, torch_dtype
from umbel.aggregation.optimizers.server_optimizer import ServerOptimizer
from umbel.aggregation.plans.masks import SumShown
from umbel.aggregation.secagg.numbers.totals import Totals
from umbel.server.blobs.blobs import Blob, BlobStore, model_key
from umbel.server.blobs.files import file_sha256


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The stored files of a model version, and what its round measured."""

    published: Blob
    master_sha256: str  # the published file's hash if there is no other master copy
    sum_sha256: str  # of the exact sum that the version was made from, as in audit bundles
    n_values: int  # of an update
    update_rms: float | None = None  # mean of the updates' root mean squares, if their codec measures it
    change: Blob | None = None  # from the version before, if the run sends changes
    totals: Totals | None = None  # of a secure round

    @property
    def shown(self) -> SumShown | None:
        """What the sum of a secure round has shown for the next."""
        return None if self.totals is None else self.totals.shown

    @property
    def sha256s(self) -> set[str]:
        """The hashes of all files."""
        return {self.published.sha256, self.master_sha256} | ({self.change.sha256} if self.change else set())


@dataclass(frozen=True, slots=True)
class ParentFiles:
    """The files of the version that the next one is made from."""

    published_sha256: str
    master_sha256: str


@dataclass(frozen=True, slots=True)
class SummedRound:
    """A round's exact sum, decoded: the next model is made from it."""

    sum_sha256: str
    mean: HasMean
    update_rms: float | None = None
    totals: Totals | None = None  # of a secure round


def inspect_model(path: Path) -> Layout:
    """Check a model file that was uploaded; return its layout. Raises `LayoutError` if no round can start from it."""
    try:
        with safe_open(path, framework="pt") as file:  # maps the file; nothing here reads its values
            owned: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            layout = layout_of(file.metadata(), owned)
    except (SafetensorError, json.JSONDecodeError, RecursionError) as error:
        raise LayoutError(f"the file is not a safetensors model: {error}") from error
    if not owned:
        raise LayoutError("the model file contains no tensor")
    _require_possible(path, layout)
    return layout


def keep_model(blobs: BlobStore, path: Path) -> Blob:
    """Store a finished file under its hash. Blocks while it hashes and stores."""
    blob = Blob(file_sha256(path), path.stat().st_size)
    blobs.put(path, model_key(blob.sha256))
    return blob


def first_master(blobs: BlobStore, model_sha256: str, layout: Layout, optimizer: ServerOptimizer) -> str:
    """Store the master copy of a run's first model unless the model file is it; return the master copy's hash."""
    if layout.is_full_precision and not optimizer.first:
        return model_sha256
    with blobs.local(model_key(model_sha256)) as given, blobs.scratch() as path:
        with TensorFile(given) as start, _new_file(path, layout, optimizer) as master:
            for piece in pieces(layout):
                piece.put(master, piece.of(start, torch_dtype(piece.spec)).to(master_dtype(piece.spec)))
            write_first(layout, optimizer, master)
        return keep_model(blobs, path).sha256


def next_model(
    blobs: BlobStore,
    layout: Layout,
    base: ParentFiles,
    summed: SummedRound,
    step: ServerStep,
    change_step: float | None,
) -> ModelFiles:
    """Store the model after this step as the next version. The same sum gives the same files.

    `change_step`: the step of changes in root mean squares; None if the run sends no changes. Raises `ModelOverflow`
    if the model has diverged.
    """
    with ExitStack() as files:
        start = files.enter_context(TensorFile(files.enter_context(blobs.local(model_key(base.master_sha256)))))
        public, master, change_file = (files.enter_context(blobs.scratch()) for _ in range(3))
        if change_step is not None:
            with blobs.local(model_key(base.published_sha256)) as before:
                copyfile(before, public)  # with its header: a client, too, makes its next model from this file
            with _new_file(master, layout, step.optimizer) as wide, TensorFile(public, is_writable=True) as moving:
                length = write_next_master(layout, start, summed.mean, step, wide, moving, change_step)
                _write_change(change_file, ChangeWriter(layout, length, wide, moving))
        elif layout.is_full_precision and not step.remembers:
            with _new_file(public, layout) as out:
                write_next(layout, start, summed.mean, step, out)
        else:
            with _new_file(public, layout) as out, _new_file(master, layout, step.optimizer) as wide:
                write_next(layout, start, summed.mean, step, out, wide)
        published = keep_model(blobs, public)
        has_master = change_step is not None or not layout.is_full_precision or step.remembers
        master_sha256 = keep_model(blobs, master).sha256 if has_master else published.sha256
        change = None if change_step is None else keep_model(blobs, change_file)
    n_values = layout.update.n_values
    return ModelFiles(published, master_sha256, summed.sum_sha256, n_values, summed.update_rms, change, summed.totals)


def _write_change(path: Path, writer: ChangeWriter) -> None:
    with path.open("wb") as file:
        file.seek(HEAD_BYTES)
        file.writelines(writer.body())
        file.seek(0)
        file.write(writer.head())


def _new_file(path: Path, layout: Layout, optimizer: ServerOptimizer | None = None) -> TensorFile:
    """Create a file of zeros and open it: a master copy if there is an optimizer, else a published model. A master copy
    in the model's own dtypes, with nothing beside them, is a model file like any other.
    """
    if optimizer is None:
        tensors, metadata = {s.name: (s.shape, torch_dtype(s)) for s in layout.owners()}, metadata_of(layout)
    else:
        tensors = master_tensors(layout, optimizer)
        metadata = master_metadata_of(layout, has_more=bool(optimizer.first))
    write_skeleton(path, tensors, metadata)
    return TensorFile(path, is_writable=True)


def _require_possible(path: Path, layout: Layout) -> None:
    with TensorFile(path) as file:
        for piece in pieces(layout):
            values = piece.of(file, torch_dtype(piece.spec))
            if values.is_floating_point() and not bool(values.isfinite().all()):
                raise LayoutError(
                    f"tensor {piece.spec.name!r} contains a NaN or an infinity; export a model that has not diverged"
                )
            if piece.spec.kind == "control" and bool(values.any()):
                raise LayoutError(
                    f"the control variate {piece.spec.name!r} is not zero, but a run begins with zeros, as its clients "
                    "do: create the run with `umbel run create`, which writes them"
                )


class TensorFile:
    """An open safetensors file. Use it in a `with` block."""

    def __init__(self, path: Path, is_writable: bool = False) -> None:
        self._file = os.open(path, os.O_RDWR if is_writable else os.O_RDONLY)
        n_bytes = int.from_bytes(os.pread(self._file, 8, 0), "little")
        self._offsets = tensor_offsets(os.pread(self._file, n_bytes, 8))

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def read(self, name: str, dtype: torch.dtype, first: int, n_values: int) -> Tensor:
        """Values `first` to `first + n_values` of a tensor of `dtype`, as one dimension."""
        buffer = bytearray(n_values * dtype.itemsize)
        n_read = os.preadv(self._file, [buffer], self._offsets[name] + first * dtype.itemsize)
        if n_read != len(buffer):
            raise OSError(f"the model file is shorter than its header says at tensor {name!r}")
        return torch.frombuffer(buffer, dtype=dtype)

    def write(self, name: str, first: int, values: Tensor) -> None:
        """Overwrite the values from `first` on with `values`: one dimension, in the tensor's dtype."""
        data = values.contiguous().view(torch.uint8).numpy()
        n_written = os.pwrite(self._file, data.data, self._offsets[name] + first * values.dtype.itemsize)
        if n_written != data.nbytes:
            raise OSError(f"only {n_written} of {data.nbytes} bytes of tensor {name!r} were written to disk")


def write_skeleton(
    path: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], metadata: dict[str, str]
) -> None:
    """Create a safetensors file of zeros, for `TensorFile.write` to fill."""

    save_file({name: _zeros(shape, dtype) for name, (shape, dtype) in tensors.items()}, path, metadata)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory: private pages that are only read all map to one zero page of the kernel."""
    n_bytes = torch.Size(shape).numel() * dtype.itemsize
    if n_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).reshape(shape)
