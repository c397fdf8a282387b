"""A simulated run on disk, so that killed at any instant and started again it ends in the same model.

```
<folder>/rounds.jsonl             a line for each ended attempt
<folder>/checkpoint.safetensors   the model, what error feedback has left over, and where the run stands
```

The checkpoint says how many bytes of `rounds.jsonl` were written when it was made, and their SHA-256. What stands there
beyond them is of rounds that will be simulated again: it is cut off.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from umbel.aggregation.codec.feedback import Residual
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.phrases import agreeing
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.round.states import Recruiting
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.report_times import Observation
from umbel.aggregation.run.run_end import KeptVersion
from umbel.aggregation.types import ClientId
from umbel.client.files import write_atomically
from umbel.sim.experiment.inputs import Digests, changed
from umbel.sim.federation.memory import Memory
from umbel.sim.federation.standing import Standing
from umbel.sim.federation.versions import Bytes, ModelState

ROWS_FILE, CHECKPOINT_FILE = "rounds.jsonl", "checkpoint.safetensors"
_VERSION = 4


@dataclass(frozen=True, slots=True)
class Written:
    """What stands in `rounds.jsonl`: so many bytes, with this SHA-256."""

    n_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class _Kept:
    """What of `Standing` is not the file's, with what goes with it. `inputs`: what the run is made of (`inputs.py`)."""

    version: int
    rows: Written
    wall_s: float
    engine: str
    model: ModelRef
    state: Recruiting
    status: RunStatus
    reason: str
    now: float
    observations: tuple[Observation, ...]
    history: tuple[KeptVersion, ...]
    update_bytes: int | None
    change: Bytes | None
    has: dict[ClientId, int]
    changes: tuple[int, ...]
    inputs: dict[str, str]


_KEPT = TypeAdapter(_Kept)


class CheckpointError(Exception):
    """A checkpoint cannot be gone on from: one sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """`wall_s`: seconds that the run has taken so far, over all processes; `engine`: the last that did its work."""

    standing: Standing
    model: ModelState
    memory: Memory
    rows: Written
    wall_s: float
    engine: str


def write_checkpoint(
    folder: Path,
    standing: Standing,
    model: ModelState,
    memory: Memory,
    rows: Written,
    wall_s: float,
    engine: str,
    inputs: Digests,
) -> None:
    """Replace the checkpoint, durably. Raises `OSError`."""
    kept = _Kept(
        _VERSION,
        rows,
        wall_s,
        engine,
        standing.model,
        standing.state,
        standing.status,
        standing.reason,
        standing.now,
        standing.observations,
        standing.history,
        standing.update_bytes,
        model.change,
        memory.has,
        memory.changes,
        dict(inputs),
    )
    tensors = {f"master/{name}": value for name, value in model.master.items()}
    tensors |= {f"published/{name}": value for name, value in model.published.items()}
    for client, left in memory.left.items():
        tensors |= {f"left/{client}/{name}": value for name, value in left.to_tensors().items()}
    contiguous = {name: value.contiguous().clone() for name, value in tensors.items()}
    text = _KEPT.dump_json(kept).decode()
    write_atomically(folder / CHECKPOINT_FILE, save(contiguous, {"umbel": text, "sha256": _digest(text, contiguous)}))


def read_checkpoint(folder: Path, file: RunFile, first: ModelState, inputs: Digests) -> Resumed | None:
    """Where the run stands, None before its first checkpoint. `first`: its first model; `inputs`: what it is made of
    now.

    Raises `CheckpointError` for one that is damaged, of another version, or of other inputs; `OSError`.
    """
    path = folder / CHECKPOINT_FILE
    if not path.exists():
        return None
    if not path.is_file():
        raise CheckpointError(f"{path} is no file; remove its folder to begin anew")
    try:
        with safe_open(path, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            metadata: Mapping[str, str] = opened.metadata() or {}
        if json.loads(metadata["umbel"])["version"] != _VERSION:
            raise CheckpointError(f"{path} is of another version of umbel; remove its folder to begin anew")
        kept = _KEPT.validate_json(metadata["umbel"])
        if metadata["sha256"] != _digest(metadata["umbel"], tensors):
            raise ValueError("it is not as it was written")
        if unlike := changed(kept.inputs, inputs):
            are = agreeing(len(unlike), "is", "are")
            raise CheckpointError(
                f"{' and '.join(unlike)} {are} not as when {folder} was begun (SHA-256), so what came of both would "
                "be of neither; put it back as it was, or choose another folder (--out)"
            )
        return _resumed(kept, tensors, file, first)
    except (SafetensorError, ValidationError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}); remove its folder to begin anew") from error


def _resumed(kept: _Kept, tensors: Mapping[str, Tensor], file: RunFile, first: ModelState) -> Resumed:
    master = _under("master/", tensors)
    published = _under("published/", tensors)
    layout = first.layout
    layout.require(published, "the checkpoint")
    named = Bytes(kept.model.sha256, kept.model.size_bytes)
    left = dict[ClientId, dict[str, Any]]()
    for name, value in _under("left/", tensors).items():
        client, _, what = name.partition("/")
        left.setdefault(ClientId(client), {})[what] = value
    residuals = {client: Residual.from_tensors(found) for client, found in left.items()}
    memory = Memory(residuals, kept.has, kept.changes)
    standing = Standing(
        file,
        kept.model,
        kept.state,
        kept.status,
        kept.reason,
        kept.now,
        kept.observations,
        kept.history,
        kept.update_bytes,
    )
    model = ModelState(layout, master, published, named, kept.change)
    return Resumed(standing, model, memory, kept.rows, kept.wall_s, kept.engine)


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Of all that a checkpoint holds: what was changed since, on the disk or by hand, is not gone on from."""
    found = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name]
        found.update(f"\0{name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
        found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
