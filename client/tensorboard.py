"""Curves for TensorBoard: each line of a `rounds.jsonl` becomes points of event files, one for each of its numbers.

The last part of a tag is the number's name in the line, as in `seconds/sum_s`. Metrics have a tag for each kind of
data: `loss/train`, `loss/evaluation` (held-out data of clients) and `loss/test` (the test set of a simulation). Numbers
of single clients, exact counts and texts have no points.

`rounds.jsonl` is the record, and event files are copies of it. Each start of a run writes all lines again, and
TensorBoard then drops the points of older files in the folder. So after a kill no point is there twice, and none is
missing.
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from umbel.aggregation.plans.round import Task
from umbel.aggregation.run.file import RunFile
from umbel.client.errors import ClientError

FOLDER = "tensorboard"  # of a run's event files, in its own folder
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "seconds": (
        *("wall_s", "open_s", "window_s", "away_s"),
        *("train_s", "wait_s", "sum_s", "apply_s"),
        *("virtual_s", "now_s", "busy_s", "wasted_s"),
    ),
    "bytes": ("bytes_up", "bytes_down", "sent_bytes", "model_bytes", "update_bytes", "fetched_bytes"),
    "samples": (
        *("samples_per_s", "sample_count", "samples_selected", "samples_in", "samples_left_out"),
        *("samples_share", "samples_passed_over"),
    ),
    "clients": (
        *("selected", "reported", "partial", "dropped", "declined", "passed_over"),
        *("target", "minimum", "over_selection"),
    ),
    "share": ("compute_share", "work_share"),
    "updates": ("update_norm", "update_norm_deviation", "update_spread", "update_cosine", "update_dissimilarity"),
    "round": (
        *("attempt", "committed", "model_version", "rolled_back_to", "steps_asked"),
        *("epsilon", "proximal_mu"),
    ),
    "accuracy": ("groups_accuracy", "groups_accuracy_least"),
    "loss": ("train_loss_all", "groups_loss"),
}
_BY_RANK = ("update_norms", "update_cosines")
_METRICS = {
    "metrics": "train",
    "train_metrics": "train",
    "evaluation": "evaluation",
    "test_metrics": "test",
}
_QUANTILES = {
    "metric_quantiles": "train",
    "train_quantiles": "train",
    "evaluation_quantiles": "evaluation",
    "groups_quantiles": "groups",
}
_RUN_FILE = TypeAdapter(RunFile)
_QUANTILE_FIELDS = ("least", "p10", "median", "p90", "greatest")
log = logging.getLogger("umbel.client")


class TensorBoardMissing(ClientError):
    """The package `tensorboard` is not installed."""


def require_tensorboard() -> None:
    """Raise `TensorBoardMissing` if event files cannot be written."""
    if find_spec("tensorboard") is None:
        raise TensorBoardMissing(
            "event files need the package tensorboard, which is not installed: pip install 'umbel[tensorboard]', or "
            "leave --tensorboard out"
        )


class EventFolderRefused(ClientError):
    """Event files cannot be written to the folder, or a link leads from there to another user's folder."""


def require_event_folder(folder: Path) -> None:
    """Make a folder of event files if it is missing. Raises `EventFolderRefused`, `OSError`.

    Another user who may write into the folder of the run could place a link, so a link counts only if this user has
    made it and owns the folder to which it leads. Links in the place of old event files do no harm, because no start
    opens an old file for writing.
    """
    advice = "or name another folder (--out), or leave --tensorboard out"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        what = "a link that leads to no folder" if folder.is_symlink() else "no folder"
        raise EventFolderRefused(
            f"{folder} is {what}, and the event files for TensorBoard go there: move it away, {advice}"
        ) from error
    if not folder.is_symlink():
        return
    target, found = folder.resolve(), (folder.lstat(), folder.stat())
    if hasattr(os, "geteuid") and (others := {one.st_uid for one in found} - {os.geteuid(), 0}):
        raise EventFolderRefused(
            f"{folder} is a link to {target}, and user {min(others)} owns one of them, but this process runs as user "
            f"{os.geteuid()}: remove the link, {advice}"
        )
    log.info("event files for TensorBoard go to %s, because %s is a link", target, folder)


def scalars(row: Mapping[str, Any], file: RunFile | None) -> dict[str, float]:
    """The numbers of a line of `rounds.jsonl`, by tag. `file`: of its run, for the learning rates of the round; None if
    they are unknown.
    """
    return {tag: float(value) for tag, value in _all_of(row, file) if isinstance(value, int | float)}


def _all_of(row: Mapping[str, Any], file: RunFile | None) -> Iterator[tuple[str, Any]]:
    for group, names in _GROUPS.items():
        yield from ((f"{group}/{name}", row.get(name)) for name in names)
    for name in _BY_RANK:
        yield from ((f"{name}/rank_{rank}", value) for rank, value in enumerate(row.get(name, ())))
    yield "loss/train", row.get("train_loss")
    measured = "test" if "test_metrics" in row else "evaluation"
    yield from ((f"{name}/{measured}", row.get(name)) for name in ("accuracy", "loss"))
    for key, where in _METRICS.items():
        yield from ((f"{name}/{where}", value) for name, value in row.get(key, {}).items())
    for key, where in _QUANTILES.items():
        for name, found in row.get(key, {}).items():
            yield from ((f"{name}/{where}_{field}", found.get(field)) for field in _QUANTILE_FIELDS)
    if (judged := row.get("judged")) is not None:
        yield f"{judged['metric']}/judged", judged["value"]
    if (absent := row.get("absent")) is not None:
        yield from ((f"{name}/absent", absent[name]) for name in ("clients", "samples"))
    if file is not None and Task(row["task"]).makes_model:
        yield from _rates(file, row["round"])


def _rates(file: RunFile, number: int) -> Iterator[tuple[str, float]]:
    """The learning rates of a round of training: of clients, and of the server's step."""
    yield "learning_rate/client", file.training_plan(number).learning_rate
    target = file.rounds_of(number).target
    yield "learning_rate/server", file.aggregation.rate(number, file.rounds.count, target)


class EventFiles:
    """The event files of one run, while it runs. Each point's x is the round, and its time is that of the line."""

    def __init__(self, folder: Path, file: RunFile | None, rows: Iterable[Mapping[str, Any]]) -> None:
        """`file`: of the run, None if it has none. `rows`: its lines so far. Raises `TensorBoardMissing`,
        `EventFolderRefused`, `OSError`.
        """
        require_tensorboard()
        require_event_folder(folder)
        from torch.utils.tensorboard.writer import SummaryWriter

        self._file = file
        # TensorBoard drops older points where a session starts again; so the first start must be marked, too.
        self._writer: SummaryWriter = SummaryWriter(str(folder), purge_step=0)
        if file is not None:
            self._writer.add_text("run_file", _as_markdown(file), 0)
        for row in rows:
            self._write(row)
        self._writer.flush()

    def __enter__(self) -> "EventFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, row: Mapping[str, Any]) -> None:
        """Write the points of a new line, so that they survive a kill of this process."""
        self._write(row)
        self._writer.flush()

    def close(self) -> None:
        """Write the rest, and end the writing thread."""
        self._writer.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        """One event has all points, which takes a tenth of the time of an event for each."""
        from tensorboard.compat.proto import summary_pb2

        made: Any = summary_pb2  # what protobuf makes has no types
        points = [made.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(row, self._file).items()]
        events: Any = self._writer.file_writer  # which torch's types call None
        events.add_summary(made.Summary(value=points), row["round"], row.get("ended_at", row.get("now_s")))


def _as_markdown(file: RunFile) -> str:
    """A table of the run file's keys and values; keys without a value are left out."""
    found = _flat(_RUN_FILE.dump_python(file, mode="json"))
    lines = [f"| {key} | {_in_a_cell(json.dumps(value))} |" for key, value in found]
    return "\n".join(["| key | value |", "|---|---|", *lines])


def _in_a_cell(text: str) -> str:
    """As code: TensorBoard would load a picture that a text of the run file names."""
    code = text.replace("`", "'").replace("|", "\\|")
    return f"`{code}`"


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value not in (None, []):
            yield f"{prefix}{key}", value
