"""Compute a round again from what the coordinator stored: `aggregation/audit/replay.py` with files."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from umbel.aggregation.audit.bundle import AuditFailed, ModelId, Participant, RoundEnded, RunCreated
from umbel.aggregation.audit.chain import section_of, update_sha256_of
from umbel.aggregation.audit.replay import Replay
from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.artifact import master_metadata_of, metadata_of
from umbel.aggregation.model.layout import PIECE_VALUES, Layout
from umbel.aggregation.model.next_model import empty_master
from umbel.aggregation.model.state import InMemory, empty_state, torch_dtype
from umbel.aggregation.optimizers.section import AggregationSection
from umbel.aggregation.phrases import agreeing, counted
from umbel.aggregation.run.sections import DownlinkSection
from umbel.client.files import file_sha256
from umbel.client.operator.operator import Operator
from umbel.client.state.model_files import MappedModel, read_tensors

_PIECE_BYTES = 4 * PIECE_VALUES
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ReplaySource:
    """The files of a replay: those of bundle `number` of a run at a coordinator."""

    operator: Operator
    run: str
    number: int


def replay(source: ReplaySource, ended: RoundEnded, created: RunCreated, tell: Tell) -> ModelId:
    """Compute a committed round's model again; returns the model, which is the bundle's. `tell` gets each result.

    Raises `AuditFailed` for the first difference, or a `ClientError` if a download fails.
    """
    layout, change_step = _layout(created.layout), section_of(created.run_file, "downlink", DownlinkSection).change_step
    again = Replay(ended, layout, section_of(created.run_file, "aggregation", AggregationSection))
    with tempfile.TemporaryDirectory(prefix="umbel-replay-") as folder:
        for one in ended.accepted:
            _fold(source, one, again, Path(folder) / "update")
        found = again.require_sum()
        updates = counted(
            len(ended.accepted), "update has its report's hash", "updates have the hashes of their reports"
        )
        add = agreeing(len(ended.accepted), "adds", "add")
        tell(f"{updates}, and {add} up to the sum {found[:16]}…")
        made = _make_model(source, ended, layout, again, Path(folder), change_step)
    if made != ended.model_out:
        raise AuditFailed(_other_model(made, ended))
    tell(
        f"the sum makes version {made.version} of the model, with the same hash as in the bundle: sha256 {made.sha256}"
    )
    return made


def _fold(source: ReplaySource, one: Participant, again: Replay, path: Path) -> None:
    """Download one update, check it against its report, and add it. One at a time is on disk."""
    sha256, bytes_max = update_sha256_of(one), again.codec.update_bytes[-1]
    found = source.operator.download_update(source.run, source.number, one.client, path, bytes_max)
    if found != sha256:
        raise AuditFailed(
            f"the update of {one.client} was changed: its hash is {found[:16]}…, but its report says {sha256[:16]}…"
        )
    with path.open("rb", buffering=0) as file:
        again.fold(one, file.read(again.codec.header_bytes), iter(partial(file.read, _PIECE_BYTES), b""))


def _make_model(
    source: ReplaySource, ended: RoundEnded, layout: Layout, again: Replay, folder: Path, change_step: float | None
) -> ModelId:
    """Write the files of the next version as the coordinator writes them; return their hashes."""
    start, path, is_full = folder / "start", folder / "made", layout.is_full_precision
    source.operator.download_start(source.run, source.number, ended.model_in.master_sha256, start)
    before, optimizer = InMemory(_state(start)), again.step.optimizer
    master = empty_master(layout, optimizer)
    if change_step is not None:
        source.operator.download_model(ended.model_in.sha256, path)
        _state(path)  # raises for a file that is no model
        again.write_model(before, InMemory(master), MappedModel(path), change_step)
    else:
        published = empty_state(layout, torch_dtype)
        again.write_model(before, InMemory(master), InMemory(published), None)
        save_file(published, path, metadata_of(layout))
    sha256 = master_sha256 = file_sha256(path)
    if change_step is not None or not is_full or again.step.remembers:
        save_file(master, path, master_metadata_of(layout, has_more=again.step.remembers))
        master_sha256 = file_sha256(path)
    return ModelId(ended.model_in.version + 1, sha256, master_sha256)


def _state(path: Path) -> dict[str, Tensor]:
    """The tensors of a model file, mapped from disk."""
    try:
        return read_tensors(path)[1]
    except SafetensorError as error:
        raise AuditFailed(f"the model that the round began with cannot be read: {error}") from error


def _layout(text: str) -> Layout:
    try:
        return Layout.from_json(text)
    except LayoutError as error:
        raise AuditFailed(f"the layout in the run's first bundle cannot be read: {error}") from error


def _other_model(made: ModelId, ended: RoundEnded) -> str:
    assert ended.model_out is not None, "a round with a sum has a model"
    expected, maker = ended.model_out, f"This machine runs torch {torch.__version__}"
    what, (ours, theirs) = "published model", (made.sha256, expected.sha256)
    if ours == theirs:
        what, (ours, theirs) = "full-precision model", (made.master_sha256, expected.master_sha256)
    return (
        f"the computed {what} has the hash {ours[:16]}…, but the bundle says {theirs[:16]}…. {maker}; the "
        "bundle's `maker` says what made the model"
    )
