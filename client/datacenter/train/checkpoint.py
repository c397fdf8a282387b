"""A group's run on disk, so that ranks which start again go on from the last checkpoint.

```
<folder>/rounds.jsonl             a line for each ended attempt
<folder>/checkpoint.safetensors   the model with its master copy, and where the run stands
<folder>/ranks/RANK/VERSION...   what a rank's client keeps for a run that goes on from this model version
```

Rank 0 writes the first two, and gives them to the others when a run goes on, so only ranks that keep something need to
find their own files again. A checkpoint says how many bytes of `rounds.jsonl` were written before it; bytes beyond them
are of rounds that will be done again, and are cut off.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save

from umbel.aggregation.model.artifact import metadata_in
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.run.model_state import FileDigest, ModelState
from umbel.aggregation.run.standing import Standing
from umbel.client.datacenter.ranks.group import GroupError
from umbel.client.datacenter.train.shards import Shard
from umbel.client.files import write_atomically
from umbel.client.state.model_files import tensors_sha256, tensors_under

CHECKPOINT_FILE, ROWS_FILE = "checkpoint.safetensors", "rounds.jsonl"
_KEY, _SHA256, _FORMAT = "umbel.group", "sha256", 1


@dataclass(frozen=True, slots=True)
class _StoredGroup:
    format: int
    rows_bytes: int
    standing: Standing
    keeps: tuple[bool, ...]
    change: FileDigest | None
    layout: str  # digest
    data: tuple[Shard, ...] = ()


_STORED = TypeAdapter(_StoredGroup)


@dataclass(frozen=True, slots=True)
class GroupCheckpoint:
    """Where a run stands, with its model.

    `rows_bytes`: of `rounds.jsonl` before it. `keeps`: by rank, whether its client has kept something. `data`: of each
    rank; empty in older checkpoints.
    """

    standing: Standing
    model: ModelState
    rows_bytes: int = 0
    keeps: tuple[bool, ...] = ()
    data: tuple[Shard, ...] = ()

    def encode(self) -> bytes:
        stored = _StoredGroup(
            _FORMAT, self.rows_bytes, self.standing, self.keeps, self.model.change, self.model.layout.digest, self.data
        )
        tensors = {f"master/{name}": value for name, value in self.model.master.items()}
        tensors |= {f"published/{name}": value for name, value in self.model.published.items()}
        contiguous = {name: value.contiguous().clone() for name, value in tensors.items()}
        text = _STORED.dump_json(stored).decode()
        return save(contiguous, {_KEY: text, _SHA256: tensors_sha256(text, contiguous)})

    @classmethod
    def decode(cls, data: bytes, layout: Layout) -> "GroupCheckpoint":
        """`layout`: of the run's model. Raises `GroupError` for bytes that are no checkpoint of it."""
        try:
            tensors, metadata = load(data), metadata_in(data) or {}
            text = metadata[_KEY]
            if (found := json.loads(text)["format"]) != _FORMAT:
                raise GroupError(f"the checkpoint has format {found}, which this version of umbel does not read")
            stored = _STORED.validate_json(text)
            if metadata[_SHA256] != tensors_sha256(text, tensors):
                raise ValueError("it was changed")
            published = tensors_under("published/", tensors)
            if stored.layout != layout.digest:
                raise GroupError(
                    "the checkpoint is of another model than that of --app: use the model's code as it was, or another "
                    "folder (--out)"
                )
            layout.require(published, "the checkpoint")
        except (SafetensorError, ValidationError, KeyError, ValueError, TypeError) as error:
            raise GroupError(
                f"the checkpoint is damaged ({type(error).__name__}): start with another folder"
            ) from error
        ref = stored.standing.model
        named = FileDigest(ref.sha256, ref.size_bytes)
        model = ModelState(layout, tensors_under("master/", tensors), published, named, stored.change)
        return cls(stored.standing, model, stored.rows_bytes, stored.keeps, stored.data)

    def write(self, folder: Path) -> None:
        """Replace the folder's checkpoint, durably."""
        write_atomically(folder / CHECKPOINT_FILE, self.encode())
