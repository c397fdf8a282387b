"""A simulated run on disk. A run that is killed at any moment and started again ends in the same model.

```
<folder>/rounds.jsonl             a line for each ended attempt
<folder>/checkpoint.safetensors   the model, what clients keep of earlier rounds, and where the run stands
<folder>/before-end.safetensors   of a run that is over: its last checkpoint before that, from which more rounds go on
<folder>/clients/                 what the clients of `[clients]` keep across rounds (engines/clients/states.py)
```

The checkpoint says how many bytes of `rounds.jsonl` were written when it was made, and their SHA-256. Bytes beyond that
are of rounds that will be simulated again, so they are cut off.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from umbel.aggregation.codec.feedback import Residual
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.privacy.accounting import Ledger
from umbel.aggregation.round.states import Recruiting
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.model_state import FileDigest, ModelState
from umbel.aggregation.run.report_times import Observation
from umbel.aggregation.run.run_end import KeptVersion
from umbel.aggregation.run.standing import Standing
from umbel.aggregation.types import ClientId
from umbel.client.files import write_atomically
from umbel.client.state.model_files import tensors_sha256, tensors_under
from umbel.sim.engines.choose import AutoClients, AutoEngine
from umbel.sim.experiment.world import Digests, changed
from umbel.sim.federation.federation import Federation
from umbel.sim.federation.memory import Memory
from umbel.sim.federation.rows import Row, row_of
from umbel.sim.federation.site_policies import SiteMemory
from umbel.sim.federation.site_sums import PlayedSum

ROWS_FILE, CHECKPOINT_FILE, BEFORE_END_FILE = "rounds.jsonl", "checkpoint.safetensors", "before-end.safetensors"
CLIENTS_FOLDER = "clients"
_VERSION = 4


@dataclass(frozen=True, slots=True)
class RowsWritten:
    """The length of `rounds.jsonl` and the SHA-256 of its bytes."""

    n_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class _Stored:
    """A checkpoint's JSON: where the run stands, but for its file, and what goes with it."""

    version: int
    rows: RowsWritten
    wall_s: float  # over all processes so far
    engine: str  # the last that did the run's work
    model: ModelRef
    state: Recruiting
    status: RunStatus
    reason: str
    now: float
    observations: tuple[Observation, ...]
    history: tuple[KeptVersion, ...]
    update_bytes: int | None
    change: FileDigest | None
    has: dict[ClientId, int]
    changes: tuple[int, ...]
    inputs: dict[str, str]
    engine_why: str = ""  # why "auto" chose it
    rounds_count: int = 0  # of the run's file
    ledgers: tuple[Ledger, ...] = ()  # what private rounds have cost sites with a budget, each value once
    spent: dict[ClientId, int] = field(default_factory=dict[ClientId, int])  # which of these is a client's
    sums: tuple[PlayedSum, ...] = ()  # the secure rounds that sites with a policy remember


_STANDING = ("model", "state", "status", "reason", "now", "observations", "history", "update_bytes")
_STORED = TypeAdapter(_Stored)


class CheckpointError(Exception):
    """A run cannot be resumed from its checkpoint: one sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """A run as its checkpoint has it. The fields are as in `_Stored`."""

    standing: Standing
    model: ModelState
    memory: Memory
    rows: RowsWritten
    wall_s: float
    engine: str
    engine_why: str
    rounds_count: int


def write_checkpoint(
    folder: Path, run: Federation, rows: RowsWritten, wall_s: float, engine: tuple[str, str], inputs: Digests
) -> None:
    """Replace the checkpoint, durably. `engine`: its name, and why it was chosen. Raises `OSError`."""
    standing, model, memory = run.standing, run.model, run.memory
    ledgers = tuple(dict.fromkeys(memory.sites.spent.values()))
    place = {ledger: number for number, ledger in enumerate(ledgers)}
    stored = _Stored(
        version=_VERSION,
        rows=rows,
        wall_s=wall_s,
        engine=engine[0],
        engine_why=engine[1],
        **{name: getattr(standing, name) for name in _STANDING},
        change=model.change,
        has=memory.has,
        changes=memory.changes,
        inputs=dict(inputs),
        rounds_count=standing.file.rounds.count,
        ledgers=ledgers,
        spent={client: place[ledger] for client, ledger in memory.sites.spent.items()},
        sums=tuple(memory.sites.sums),
    )
    tensors = {f"master/{name}": value for name, value in model.master.items()}
    tensors |= {f"published/{name}": value for name, value in model.published.items()}
    tensors |= {f"pulls/{client}": pull for client, pull in memory.kept.items()}
    for client, left in memory.left.items():
        tensors |= {f"left/{client}/{name}": value for name, value in left.to_tensors().items()}
    contiguous = {name: value.contiguous().clone() for name, value in tensors.items()}
    text = _STORED.dump_json(stored).decode()
    write_atomically(
        folder / CHECKPOINT_FILE, save(contiguous, {"umbel": text, "sha256": tensors_sha256(text, contiguous)})
    )


def read_checkpoint(folder: Path, file: RunFile, first: ModelState, inputs: Digests) -> ResumedRun | None:
    """Where the run stands, None before its first checkpoint. `first`: its first model; `inputs`: what it is made of
    now. A run that is over and has more rounds in its file than before stands where it did before its end.

    Raises `CheckpointError` for one that is damaged, of another version, or of other inputs; `OSError`.
    """
    found = _read(folder / CHECKPOINT_FILE, file, first, inputs)
    if found is not None and found.standing.status.is_over and 0 < found.rounds_count < file.rounds.count:
        return _read(folder / BEFORE_END_FILE, file, first, inputs)
    return found


def _read(path: Path, file: RunFile, first: ModelState, inputs: Digests) -> ResumedRun | None:
    """One checkpoint, as `read_checkpoint`; None if there is none."""
    folder = path.parent
    if not path.exists():
        return None
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file; remove {folder} to start again")
    try:
        with safe_open(path, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            metadata: Mapping[str, str] = opened.metadata() or {}
        if json.loads(metadata["umbel"])["version"] != _VERSION:
            raise CheckpointError(f"{path} was written by another version of umbel; remove its folder to start again")
        kept = _STORED.validate_json(metadata["umbel"])
        if metadata["sha256"] != tensors_sha256(metadata["umbel"], tensors):
            raise ValueError("it was changed")
        if unlike := changed(kept.inputs, inputs):
            raise CheckpointError(
                f"{' and '.join(unlike)} changed since the run in {folder} began (by SHA-256), so the run cannot be "
                "resumed with the same result; restore what changed, or choose another folder (--out)"
            )
        return _resumed(kept, tensors, file, first)
    except (SafetensorError, ValidationError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}); remove its folder to start again"
        ) from error


def _resumed(kept: _Stored, tensors: Mapping[str, Tensor], file: RunFile, first: ModelState) -> ResumedRun:
    published = tensors_under("published/", tensors)
    first.layout.require(published, "the checkpoint")
    left = dict[ClientId, dict[str, Any]]()
    for name, value in tensors_under("left/", tensors).items():
        client, _, what = name.partition("/")
        left.setdefault(ClientId(client), {})[what] = value
    residuals = {client: Residual.from_tensors(found) for client, found in left.items()}
    sites = SiteMemory({client: kept.ledgers[place] for client, place in kept.spent.items()}, list(kept.sums))
    pulls = {ClientId(client): pull for client, pull in tensors_under("pulls/", tensors).items()}
    memory = Memory(residuals, kept.has, kept.changes, sites, pulls)
    standing = Standing(file, **{name: getattr(kept, name) for name in _STANDING})
    named = FileDigest(kept.model.sha256, kept.model.size_bytes)
    model = ModelState(first.layout, tensors_under("master/", tensors), published, named, kept.change)
    return ResumedRun(standing, model, memory, kept.rows, kept.wall_s, kept.engine, kept.engine_why, kept.rounds_count)


MODEL_FILE = "model.safetensors"
_CHECKPOINT_SHARE = 20  # checkpoints take at most one part in N of the time


@dataclass(slots=True)
class Kept:
    """A run's files while it runs."""

    folder: Path | None
    inputs: Digests
    rows: list[Row] = field(default_factory=list[Row])  # all so far
    engine: str = ""  # which did the work before, and why
    engine_why: str = ""
    file: BinaryIO | None = None  # rounds.jsonl, at its end; None where nothing is kept
    written: Any = field(default_factory=hashlib.sha256)  # of what stands in it
    saved_at: float = field(default_factory=time.perf_counter)
    saving_s: float = 0.0
    is_over: bool = False  # whether the checkpoint on disk is of a run that is over

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.file is not None:
            line = json.dumps(asdict(row)).encode() + b"\n"
            self.file.write(line)
            self.written.update(line)

    def save(self, federation: Federation, wall_s: float, *, is_last: bool = False) -> None:
        """Write a checkpoint if one is due. That of a run that is over is the last one (`is_last`)."""
        now, is_over = time.perf_counter(), federation.standing.status.is_over
        if self.folder is None or self.file is None or (is_over and not is_last):
            return
        if not is_last and now - self.saved_at < _CHECKPOINT_SHARE * self.saving_s:
            return
        self.file.flush()
        os.fsync(self.file.fileno())
        rows = RowsWritten(self.file.tell(), self.written.hexdigest())
        if is_over and not self.is_over:
            _keep_before_end(self.folder)
        self.is_over = is_over
        engine = self.engine_of(federation), self.why_of(federation)
        if federation.world.clients is not None:
            federation.world.clients.states.sync()
        write_checkpoint(self.folder, federation, rows, wall_s, engine, self.inputs)
        if federation.world.clients is not None and not is_over:  # a run that is over may go on from before its end
            federation.world.clients.states.oldest_start = federation.standing.model.version
        self.saved_at = time.perf_counter()
        self.saving_s = self.saved_at - now

    def save_model(self, model: ModelState) -> None:
        """The last one, as a coordinator would publish it: a safetensors file with the SHA-256 of the last row."""
        if self.folder is not None:
            body = encode_model(model.layout.full_state(model.published), model.layout)
            write_atomically(self.folder / MODEL_FILE, body)

    def engine_of(self, federation: Federation) -> str:
        """The name of the last engine that did the run's work; "auto" has none of its own before there is any."""
        name = federation.world.worker.name
        return self.engine if name == "auto" and self.engine else name

    def why_of(self, federation: Federation) -> str:
        """Why "auto" chose that engine, as it was said first; empty if the file names one."""
        engine = federation.world.worker
        return self.engine_why or (engine.why if isinstance(engine, AutoEngine | AutoClients) else "")


def _keep_before_end(folder: Path) -> None:
    """Copy the checkpoint of a run that is not over yet, if there is one."""
    if (folder / CHECKPOINT_FILE).exists():
        new = folder / f"{BEFORE_END_FILE}.new"
        shutil.copyfile(folder / CHECKPOINT_FILE, new)
        new.replace(folder / BEFORE_END_FILE)


@contextlib.contextmanager
def keeping(folder: Path | None, inputs: Digests, resumed: ResumedRun | None) -> Generator[Kept]:
    """The files of a run that begins or resumes. Raises `CheckpointError` if its rows are not those of `resumed`."""
    if folder is None:
        yield Kept(None, inputs)
        return
    path = folder / ROWS_FILE
    if resumed is None:
        for old in (CHECKPOINT_FILE, BEFORE_END_FILE):
            (folder / old).unlink(missing_ok=True)
        with path.open("wb") as file:
            yield Kept(folder, inputs, file=file)
        return
    text = _text_before(path, resumed.rows)
    rows = [row_of(json.loads(line)) for line in text.splitlines()]
    with path.open("ab") as file:
        kept = Kept(folder, inputs, rows, resumed.engine, resumed.engine_why, file, hashlib.sha256(text))
        kept.is_over = resumed.standing.status.is_over
        yield kept


def _text_before(path: Path, written: RowsWritten) -> bytes:
    """The bytes that the checkpoint counts; bytes beyond them are cut off. Raises `CheckpointError`."""
    damaged = f"{path} is damaged or missing; remove its folder to start this run again"
    try:
        with path.open("r+b") as file:
            text = file.read(written.n_bytes)
            if hashlib.sha256(text).hexdigest() != written.sha256:
                raise CheckpointError(damaged)
            file.truncate(written.n_bytes)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise CheckpointError(damaged) from error
    return text
