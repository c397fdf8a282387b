"""Model files on the coordinator's disk: checking what came, and making the next version from a round's sum.

The published file is what clients download. The master copy is the same file, or a second one: with half-precision
tensors widened to float32, or because clients are sent changes, and the published model follows in steps. A commit goes
from file to file in pieces: beside the sum it needs a few megabytes, whatever the model's size.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile

from safetensors import SafetensorError, safe_open
from torch import Tensor

from umbel.aggregation.downlink.change import HEAD_BYTES, ChangeWriter
from umbel.aggregation.downlink.publishing import Spread
from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.artifact import layout_of, master_metadata_of, metadata_of
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.optimizer import HasMean, next_pieces
from umbel.aggregation.model.state import Piece, master_dtype, pieces, published, torch_dtype
from umbel.aggregation.plans.masks import SumShown
from umbel.aggregation.secagg.numbers.totals import Totals
from umbel.server.blobs.blobs import Blob, BlobStore, model_key
from umbel.server.blobs.files import file_sha256
from umbel.server.sums.tensor_file import TensorFile, write_skeleton


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A version's files, of `n_values`. `master_sha256` equals the published one's if there is no need of another.

    `sum_sha256`: of the exact sum that it was made of, as audit bundles have it. `update_rms`: the mean of the updates'
    root mean squares, where their codec measures it. `change`: from the version before it, if the run makes changes.
    `totals`: of a secure round, what its clients have said together.
    """

    published: Blob
    master_sha256: str
    sum_sha256: str
    n_values: int
    update_rms: float | None = None
    change: Blob | None = None
    totals: Totals | None = None

    @property
    def shown(self) -> SumShown | None:
        """What the sum of a secure round has shown for the next."""
        return None if self.totals is None else self.totals.shown

    @property
    def sha256s(self) -> set[str]:
        """The names of all of them."""
        return {self.published.sha256, self.master_sha256} | ({self.change.sha256} if self.change else set())


@dataclass(frozen=True, slots=True)
class ParentFiles:
    """The version that the next one is made from, by its files' names."""

    published_sha256: str
    master_sha256: str


@dataclass(frozen=True, slots=True)
class SummedRound:
    """What the model is made of. `sum_sha256`: of a round's exact sum; the rest is what its codec makes of that.

    `totals`: of a secure round.
    """

    sum_sha256: str
    mean: HasMean
    update_rms: float | None = None
    totals: Totals | None = None


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
    if layout.is_full_precision:
        return model_sha256
    with blobs.local(model_key(model_sha256)) as given, blobs.scratch() as path:
        _begin(path, layout, is_master=True)
        with TensorFile(given) as start, TensorFile(path, is_writable=True) as master:
            for piece in pieces(layout):
                values = piece.of(start, torch_dtype(piece.spec))
                master.write(piece.spec.name, piece.first, values.to(master_dtype(piece.spec)))
        return keep_model(blobs, path).sha256


def next_model(
    blobs: BlobStore,
    layout: Layout,
    base: ParentFiles,
    summed: SummedRound,
    learning_rate: float,
    change_step: float | None,
) -> ModelFiles:
    """Store `master + learning_rate * mean` as the next version. The same sum gives the same files.

    `change_step`: where clients are sent changes, their step in root mean squares; else None. Raises `ModelOverflow`
    for a model that has diverged.
    """
    with blobs.local(model_key(base.master_sha256)) as path, TensorFile(path) as start:
        steps = next_pieces(layout, start, summed.mean, learning_rate)
        kept = (
            _whole(blobs, layout, steps) if change_step is None else _changed(blobs, layout, base, steps, change_step)
        )
    return ModelFiles(
        kept.published,
        kept.master_sha256,
        summed.sum_sha256,
        layout.n_values,
        summed.update_rms,
        kept.change,
        summed.totals,
    )


@dataclass(frozen=True, slots=True)
class _Kept:
    """The stored files of a version; see `ModelFiles`."""

    published: Blob
    master_sha256: str
    change: Blob | None = None


def _whole(blobs: BlobStore, layout: Layout, steps: Iterator[tuple[Piece, Tensor]]) -> _Kept:
    """Store the next version as its master copy is, rounded where it is of half precision."""
    with blobs.scratch() as public, blobs.scratch() as master, ExitStack() as files:
        _begin(public, layout, is_master=False)
        out = [files.enter_context(TensorFile(public, is_writable=True))]
        if not layout.is_full_precision:
            _begin(master, layout, is_master=True)
            out.append(files.enter_context(TensorFile(master, is_writable=True)))
        for piece, stepped in steps:
            for output, made in zip(out, (published(piece.spec, stepped), stepped), strict=False):
                output.write(piece.spec.name, piece.first, made)
        kept = keep_model(blobs, public)
        return _Kept(kept, kept.sha256 if layout.is_full_precision else keep_model(blobs, master).sha256)


def _changed(
    blobs: BlobStore, layout: Layout, base: ParentFiles, steps: Iterator[tuple[Piece, Tensor]], change_step: float
) -> _Kept:
    """Store the next master copy, the change that moves the published model towards it, and that model, moved."""
    with (
        blobs.local(model_key(base.published_sha256)) as before,
        blobs.scratch() as master,
        blobs.scratch() as public,
        blobs.scratch() as change,
    ):
        step = _step_master(layout, before, master, steps).step(change_step)
        copyfile(before, public)  # header and all: a client makes its next model of the one that it has
        with TensorFile(master) as new, TensorFile(public, is_writable=True) as moving, change.open("wb") as file:
            writer = ChangeWriter(layout, step, new, moving)
            file.seek(HEAD_BYTES)
            file.writelines(writer.body())
            file.seek(0)
            file.write(writer.head())
        return _Kept(keep_model(blobs, public), keep_model(blobs, master).sha256, keep_model(blobs, change))


def _step_master(layout: Layout, before: Path, master: Path, steps: Iterator[tuple[Piece, Tensor]]) -> Spread:
    """Write the next master copy; how far the published model `before` is from it."""
    spread = Spread()
    _begin(master, layout, is_master=True)
    with TensorFile(before) as old, TensorFile(master, is_writable=True) as out:
        for piece, stepped in steps:
            out.write(piece.spec.name, piece.first, stepped)
            spread.add(piece.spec, stepped, piece.of(old, torch_dtype(piece.spec)))
    return spread


def _begin(path: Path, layout: Layout, is_master: bool) -> None:
    """A file of zeros. A master copy in the model's own dtypes is a model file like any other."""
    dtypes = {s.name: master_dtype(s) if is_master else torch_dtype(s) for s in layout.owners()}
    is_other = is_master and not layout.is_full_precision
    metadata = master_metadata_of(layout) if is_other else metadata_of(layout)
    write_skeleton(path, {s.name: (s.shape, dtypes[s.name]) for s in layout.owners()}, metadata)


def _require_finite(path: Path, layout: Layout) -> None:
    with TensorFile(path) as file:
        for piece in pieces(layout):
            values = piece.of(file, torch_dtype(piece.spec))
            if values.is_floating_point() and not bool(values.isfinite().all()):
                raise LayoutError(
                    f"tensor {piece.spec.name!r} holds a NaN or an infinity; export a model that has not diverged"
                )
