"""A run while it is simulated: its rows so far, and what of it is on disk."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from umbel.aggregation.model.artifact import encode_model
from umbel.client.files import write_atomically
from umbel.sim.experiment.checkpoint import ROWS_FILE, CheckpointError, Resumed, Written, write_checkpoint
from umbel.sim.experiment.inputs import Digests
from umbel.sim.federation.federation import Federation
from umbel.sim.federation.rows import Row, row_of
from umbel.sim.federation.versions import ModelState

MODEL_FILE = "model.safetensors"
_CHECKPOINT_SHARE = 20  # of the time, at most one part in so many goes into checkpoints


@dataclass(slots=True)
class Kept:
    """`rows`: all so far. `engine`: which did the work before; `file`: rounds.jsonl, at its end, None where nothing is
    kept; `written`: the SHA-256 of what stands in it.
    """

    folder: Path | None
    inputs: Digests
    rows: list[Row] = field(default_factory=list[Row])
    engine: str = ""
    file: BinaryIO | None = None
    written: Any = field(default_factory=hashlib.sha256)
    saved_at: float = field(default_factory=time.perf_counter)
    saving_s: float = 0.0

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.file is not None:
            line = json.dumps(asdict(row)).encode() + b"\n"
            self.file.write(line)
            self.written.update(line)

    def save(self, federation: Federation, wall_s: float, *, is_last: bool = False) -> None:
        """A checkpoint, if it is time for one."""
        now = time.perf_counter()
        if self.folder is None or self.file is None:
            return
        if not is_last and now - self.saved_at < _CHECKPOINT_SHARE * self.saving_s:
            return
        self.file.flush()
        os.fsync(self.file.fileno())
        rows = Written(self.file.tell(), self.written.hexdigest())
        standing, model, memory = federation.standing, federation.model, federation.memory
        write_checkpoint(self.folder, standing, model, memory, rows, wall_s, self.engine_of(federation), self.inputs)
        self.saved_at = time.perf_counter()
        self.saving_s = self.saved_at - now

    def save_model(self, model: ModelState) -> None:
        """The last one, as a coordinator would publish it: a safetensors file with the SHA-256 of the last row."""
        if self.folder is not None:
            body = encode_model(model.layout.full_state(model.published))
            write_atomically(self.folder / MODEL_FILE, body)

    def engine_of(self, federation: Federation) -> str:
        """The name of the last engine that did the run's work; "auto" has none of its own before there is any."""
        name = federation.world.engine.name
        return self.engine if name == "auto" and self.engine else name


@contextlib.contextmanager
def keeping(folder: Path | None, inputs: Digests, resumed: Resumed | None) -> Generator[Kept]:
    """What a run writes, or goes on to write. Raises `CheckpointError` where its rows are not those of `resumed`."""
    if folder is None:
        yield Kept(None, inputs)
        return
    path = folder / ROWS_FILE
    if resumed is None:
        with path.open("wb") as file:
            yield Kept(folder, inputs, file=file)
        return
    text = _text_before(path, resumed.rows)
    rows = [row_of(json.loads(line)) for line in text.splitlines()]
    with path.open("ab") as file:
        yield Kept(folder, inputs, rows, resumed.engine, file, hashlib.sha256(text))


def _text_before(path: Path, written: Written) -> bytes:
    """What stands there before the checkpoint; what comes after is cut off. Raises `CheckpointError`."""
    damaged = f"{path} is damaged, or gone; remove its folder to begin this run anew"
    try:
        with path.open("r+b") as file:
            text = file.read(written.n_bytes)
            if hashlib.sha256(text).hexdigest() != written.sha256:
                raise CheckpointError(damaged)
            file.truncate(written.n_bytes)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise CheckpointError(damaged) from error
    return text
