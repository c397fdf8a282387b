"""`umbel train`: a run file, carried out by the ranks of one torchrun job, or by one process alone.

```
<out>/rounds.jsonl         a line for each ended attempt: its record, and how long its parts took
<out>/model.safetensors    the last model
<out>/summary.json         how the run ended, and all that it depends on
<out>/tensorboard/         event files for TensorBoard, if they are asked for
<out>/checkpoint...        see `checkpoint.py`
```

Rank 0 writes these. Started again with the same command, after an end of any kind, the run goes on from its checkpoint.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.model.artifact import decode_model
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.round import Task
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.records import RoundRecord
from umbel.client.app import Client
from umbel.client.datacenter.ranks.group import Group, GroupError, joined
from umbel.client.datacenter.ranks.names import RankNames
from umbel.client.datacenter.ranks.versions import versions
from umbel.client.datacenter.silo.client import leading
from umbel.client.datacenter.silo.rank import SiloRank, follow
from umbel.client.datacenter.train.beginning import agreed, first_checkpoint, next_checkpoint
from umbel.client.datacenter.train.checkpoint import CHECKPOINT_FILE, ROWS_FILE, GroupCheckpoint
from umbel.client.datacenter.train.division import divided
from umbel.client.datacenter.train.federation import GroupAttempt, GroupFederation
from umbel.client.datacenter.train.leaving import Leaving
from umbel.client.datacenter.train.named_client import client_of
from umbel.client.datacenter.train.shards import Shard, changed_data, compared_shards
from umbel.client.files import locked_file, make_private, write_atomically
from umbel.client.rounds.shutdown import Shutdown
from umbel.client.state.model_files import write_model
from umbel.client.tensorboard import FOLDER, EventFiles, require_tensorboard

MODEL_FILE, SUMMARY_FILE = "model.safetensors", "summary.json"
_RANKS, _LOCK = "ranks", ".lock"
_CHECKPOINT_SHARE = 20  # checkpoints take at most one part in N of the time
_RECORD = TypeAdapter(RoundRecord)
log = logging.getLogger("umbel.client")


@dataclass(frozen=True, slots=True)
class TrainEnd:
    """How a call of `umbel train` ended. `leaving`: why it ended before the run did; empty if the run is over."""

    status: RunStatus
    reason: str
    rounds: int  # that have made a model
    model_sha256: str
    model: str  # file of the last model
    leaving: str = ""


def train_run(
    file: RunFile,
    app: str,
    out: Path,
    first: Path | None,
    told: Callable[[GroupAttempt], None],
    *,
    ranks_per_client: int = 1,
    may_share: bool = False,
    compares_updates: bool = False,
    writes_events: bool = False,
) -> tuple[TrainEnd | None, bool]:
    """Carry out a run on this rank, with all the others. Returns how it ended, and whether this is rank 0. A rank that
    follows the first rank of its client hears nothing of the end.

    `app`: "module:name" of this rank's client. `ranks_per_client`: see `division.py`. `first`: a file of the first
    model. `told`: called on rank 0 with each attempt. `may_share`: whether clients may train on the same samples.
    `compares_updates`: as for `GroupFederation`. `writes_events`: whether rank 0 writes event files for TensorBoard.
    Raises `ClientError` and `OSError` with one sentence that says what to do.
    """
    if writes_events:
        require_tensorboard()
    begin = partial(
        _carried_out,
        file=file,
        out=out,
        first=first,
        told=told,
        ranks_per_client=ranks_per_client,
        may_share=may_share,
        compares_updates=compares_updates,
        writes_events=writes_events,
    )
    patience_s = _patience_s(file)
    with joined(timeout_s=patience_s) as job:
        if ranks_per_client == 1:
            client = client_of(app, job.rank, job.size, file.seed)
            return begin(job, client, client), job.is_first
        ranks = divided(job, ranks_per_client, patience_s)
        silo = SiloRank(client_of(app, ranks.number, ranks.n_clients, file.seed, ranks.mesh), ranks.own)
        if ranks.first_ranks is None:
            follow(silo)
            return None, False
        with leading(silo) as whole:
            return begin(ranks.first_ranks, whole, silo.app), job.is_first


def _carried_out(
    group: Group,
    client: Client,
    holder: Client,
    *,
    file: RunFile,
    out: Path,
    first: Path | None,
    told: Callable[[GroupAttempt], None],
    ranks_per_client: int,
    may_share: bool,
    compares_updates: bool,
    writes_events: bool,
) -> TrainEnd:
    """`holder`: has the training data of `client`."""
    shutdown = Shutdown()
    leaving = Leaving(group, lambda: shutdown.reason)
    on = agreed(group, file, client, leaving)
    shards = compared_shards(group, holder, on.sizes, may_share=may_share)
    own, saved = out / _RANKS / str(group.rank), _saved(group, out)
    if group.from_first(b"0" if saved is None else b"1") == b"1":
        start = next_checkpoint(group, file, on, saved or b"", own)
        if group.is_first:
            _tell_of_changes(start, shards, out, first, group.names)
    else:
        start = first_checkpoint(group, file, on, _first_model(group, first))
    start = replace(start, data=tuple(shards))
    run = GroupFederation(
        group, on.rank_client, on.sizes, start.standing, start.model, leaving.own, compares_updates=compares_updates
    )
    folder = _RunFolder(out, own, group, run, start, ranks_per_client, writes_events=writes_events)
    with folder.locked(), shutdown.on_signals():
        for attempt in run.attempts():
            folder.add(attempt)
            if group.is_first:
                told(attempt)
        return folder.close()


def _tell_of_changes(
    start: GroupCheckpoint, shards: Sequence[Shard], out: Path, first: Path | None, names: RankNames
) -> None:
    """Log what this run goes on without, or with other than before."""
    if first is not None:
        log.info(
            "--model %s is ignored: the run in %s goes on from its checkpoint, after %s. To begin with that file, name "
            "another folder (--out)",
            first,
            out,
            counted(start.standing.model.version, "round"),
        )
    for rank in changed_data(start.data, shards):
        log.warning(
            "%s has other training data than before this start (%s then, %d now), so the model will belong to "
            "neither. If that is a mistake, stop the run, restore the data, and start the same command again",
            names.of(rank),
            counted(start.data[rank].samples, "sample"),
            shards[rank].samples,
        )


def _patience_s(file: RunFile) -> float:
    """How long a rank waits for the others: the longest window, and time to begin and to add up."""
    return max(file.rounds_of(number).window_s for number in file.rounds_of_change()) + 600


def _first_model(group: Group, path: Path | None) -> Mapping[str, Tensor] | None:
    if path is None or not group.is_first:
        return None
    return decode_model(path.read_bytes())[1]


def _saved(group: Group, out: Path) -> bytes | None:
    """Rank 0's checkpoint; None without one, and on other ranks. Raises `GroupError` for a folder of something else."""
    if not group.is_first:
        return None
    path = out / CHECKPOINT_FILE
    if path.exists():
        return path.read_bytes()
    for name in (ROWS_FILE, MODEL_FILE, SUMMARY_FILE):
        if (out / name).exists():
            raise GroupError(f"{out / name} exists, but {out} has no checkpoint of a run: name another folder (--out)")
    return None


class _RunFolder:
    """The files of a run while it runs: rank 0's, and those of this rank's own client (`own`)."""

    def __init__(
        self,
        out: Path,
        own: Path,
        group: Group,
        run: GroupFederation,
        start: GroupCheckpoint,
        ranks_per_client: int,
        *,
        writes_events: bool,
    ) -> None:
        """`start`: where the run begins, or goes on. `writes_events`: as for `train_run`."""
        self._ranks_per_client, self._writes_events = ranks_per_client, writes_events
        self._events: EventFiles | None = None
        self._out, self._own, self._group, self._run = out, own, group, run
        self._rows, self._n_rounds = out / ROWS_FILE, 0
        self._saved_at, self._saving_s = time.monotonic(), 0.0
        self._start, self._data = start, start.data

    @contextmanager
    def locked(self) -> Generator[None]:
        """Keep other runs out of the folder in this block, and cut off the lines of rounds that will be done again.

        Raises `GroupError` if another run is in it, or if its lines are not those of the checkpoint.
        """
        if not self._group.is_first:
            yield
            return
        if not self._out.exists():
            make_private(self._out)
        with ExitStack() as held:
            try:
                held.enter_context(locked_file(self._out / _LOCK, waits=False))
            except BlockingIOError as error:
                raise GroupError(
                    f"another run is writing to {self._out}: wait for its end, or name another folder (--out)"
                ) from error
            if not (self._out / CHECKPOINT_FILE).exists():
                self._start.write(self._out)
            self._n_rounds = _n_rounds_before(self._rows, self._start.rows_bytes)
            if self._writes_events:
                file, rows = self._start.standing.file, _lines(self._rows)
                self._events = held.enter_context(EventFiles(self._out / FOLDER, file, rows))
            yield

    def add(self, attempt: GroupAttempt) -> None:
        """Take an ended attempt, and save the run if that is due."""
        began = time.monotonic()
        if self._group.is_first:
            row = _row(attempt, time.time())
            self._n_rounds += _makes_model(row)
            with self._rows.open("ab") as file:
                file.write(json.dumps(row).encode() + b"\n")
            if self._events is not None:
                self._events.add(row)
        is_last = self._run.standing.status is not RunStatus.RUNNING or bool(self._run.leaving)
        is_due = is_last or began - self._saved_at >= _CHECKPOINT_SHARE * self._saving_s
        if self._group.from_first(b"1" if is_due else b"0") == b"1":
            self._save()
            self._saved_at, self._saving_s = time.monotonic(), time.monotonic() - began

    def _save(self) -> None:
        """Write what each rank keeps, and then the checkpoint that counts on it."""
        run, rank_client = self._run, self._run.rank_client
        version = run.standing.model.version
        if rank_client.keeps:
            rank_client.write(self._own, run.standing.state.plan.run, version)
        with self._group.waiting_for("what the other ranks save"):
            keeps = tuple(one == b"1" for one in self._group.gather(b"1" if rank_client.keeps else b"0"))
        if self._group.is_first:
            with self._rows.open("ab") as file:
                os.fsync(file.fileno())
                rows_bytes = file.tell()
            GroupCheckpoint(run.standing, run.model, rows_bytes, keeps, self._data).write(self._out)
        self._group.gather(b"")  # from here on, no rank begins with an older checkpoint
        rank_client.forget_before(self._own, version)

    def close(self) -> TrainEnd:
        """Write the last model and the summary."""
        run, model, path = self._run, self._run.model, self._out / MODEL_FILE
        standing = run.standing
        end = TrainEnd(standing.status, standing.reason, self._n_rounds, standing.model.sha256, str(path), run.leaving)
        if self._group.is_first:
            write_model(path, model.layout.full_state(model.published), model.layout)
            depends = {
                "ranks": self._group.size * self._ranks_per_client,
                "ranks_per_client": self._ranks_per_client,
                "device": self._group.device.type,
                "seed": standing.file.seed,
                "versions": versions(),
                "data": [asdict(one) for one in self._data],
            }
            write_atomically(self._out / SUMMARY_FILE, json.dumps({**asdict(end), **depends}, indent=1).encode())
        return end


def _n_rounds_before(rows: Path, n_bytes: int) -> int:
    """The rounds that have made a model, by the first bytes of `rounds.jsonl`; the rest is cut off."""
    with rows.open("a+b") as file:
        if file.tell() < n_bytes:
            raise GroupError(
                f"{rows} is missing or shorter than when the run was saved: restore it, or start again with another "
                "folder (--out)"
            )
        file.truncate(n_bytes)
        file.seek(0)
        try:
            return sum(_makes_model(json.loads(line)) for line in file)
        except (ValueError, KeyError) as error:
            raise GroupError(f"{rows} is damaged: start again with another folder (--out)") from error


def _lines(rows: Path) -> Iterator[dict[str, Any]]:
    with rows.open("rb") as file:
        yield from map(json.loads, file)


def _row(attempt: GroupAttempt, ended_at: float) -> dict[str, Any]:
    """A line of `rounds.jsonl`: the record, with the names that lines of a simulation have, and the cost on rank 0.

    `ended_at`: in Unix seconds; the times in the record are seconds since the run began, without pauses.
    """
    record, evaluation = attempt.record, attempt.record.evaluation
    names: dict[str, Any] = {
        "accuracy": evaluation.get("accuracy", evaluation.get("confusion.accuracy")),
        "loss": evaluation.get("loss"),
        "train_loss": record.metrics.get("loss"),
        "virtual_s": record.wall_s,
        "ended_at": ended_at,
    }
    cost, figures = attempt.cost, attempt.figures
    if cost.total_s:
        names |= {"compute_share": cost.train_s / cost.total_s}
        names |= {"samples_per_s": attempt.samples_seen / cost.total_s} if attempt.samples_seen else {}
    if figures is not None:
        names |= {"update_norm": figures.update_norm, "update_cosine": figures.update_cosine, **asdict(figures)}
    return {**_RECORD.dump_python(record, mode="json"), **names, **asdict(cost)}


def _makes_model(row: Mapping[str, Any]) -> bool:
    return bool(row["committed"]) and Task(row["task"]).makes_model
