"""A training in progress on several ranks: each rank keeps its own shards, and all resume after the same step.

A rank may be killed while others have saved already. So each rank keeps its last two saves, and all resume from the
newest one that every rank has.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from umbel.aggregation.types import AssignmentId
from umbel.client.datacenter.ranks.group import Group
from umbel.client.local.checkpoint import Checkpoint
from umbel.client.state.checkpoint import DiskCheckpoint

_SHARD, _LIKE = "umbel.shard", "umbel.like"


class RankCheckpoint(Checkpoint):
    """The checkpoint of one rank. All ranks must call `save` and `load` together."""

    def __init__(
        self, folder: Path, belongs_to: Mapping[str, str], model: nn.Module, ranks: Group, n_bytes: int
    ) -> None:
        """`n_bytes`: of this rank's tensors, for an estimate of the first save."""
        self._belongs_to, self._model, self._ranks = dict(belongs_to), model, ranks
        # Shards of another number of ranks are other shards.
        place = AssignmentId(f"{belongs_to['assignment']}, rank {ranks.rank} of {ranks.size}")
        self._slots = [
            DiskCheckpoint(folder / f"{number}.checkpoint.safetensors", place, belongs_to["model_sha256"], n_bytes)
            for number in range(2)
        ]
        self._next = 0
        self.must_save: Callable[[], bool] = self.has_waited

    @property
    def belongs_to(self) -> dict[str, str]:
        return self._belongs_to

    def has_waited(self) -> bool:
        """Whether it is time to save again, as this rank sees it."""
        return all(slot.is_due() for slot in self._slots)

    def is_due(self) -> bool:
        return self.must_save()

    def save(self, state: Mapping[str, object]) -> None:
        self._slots[self._next].save(cast(dict[str, object], _without_shards(state, self._model)))
        self._next = 1 - self._next

    def load(self) -> dict[str, Any] | None:
        found = [slot.load() for slot in self._slots]
        steps = [0 if one is None else int(one["steps_done"]) for one in found]
        common = set.intersection(*(set(json.loads(one)) for one in self._ranks.gather(json.dumps(steps).encode())))
        newest = max(common - {0}, default=0)
        if not newest:
            return None
        slot = steps.index(newest)
        self._next = 1 - slot
        return cast(dict[str, Any], _with_shards(found[slot], self._model))

    def forget(self) -> None:
        for slot in self._slots:
            slot.forget()


def _without_shards(value: Any, model: nn.Module) -> Any:
    """The values with this rank's shard in the place of each sharded tensor, and the name of a parameter that is
    sharded alike.
    """
    alike = {_place(one): name for name, one in model.named_parameters() if isinstance(one, DTensor)}

    def packed(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        if (name := alike.get(_place(value))) is None:
            raise ValueError("a sharded tensor is unlike every parameter of the model")
        return {_SHARD: value.to_local(), _LIKE: name}

    return _mapped(value, packed)


def _with_shards(value: Any, model: nn.Module) -> Any:
    """The inverse of `_without_shards`."""
    parameters = dict(model.named_parameters())

    def unpacked(value: Any) -> Any:
        match value:
            case {"umbel.shard": Tensor() as shard, "umbel.like": str(name)}:
                like = parameters[name]
                assert isinstance(like, DTensor), "it was when this was saved"
                local = shard.to(like.device)
                return DTensor.from_local(
                    local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
                )
            case _:
                return value

    return _mapped(value, unpacked)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The nested values, each as `change` returns it; what it returns as it was is looked into."""
    if (changed := change(value)) is not value:
        return changed
    match value:
        case Mapping():
            return {key: _mapped(one, change) for key, one in value.items()}
        case list() | tuple():
            return type(value)(_mapped(one, change) for one in cast(list[Any], value))
        case _:
            return value


def _place(tensor: DTensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements)


def forget_others(folder: Path, n_ranks: int) -> None:
    """Remove on this machine what ranks have saved of which there are none any more."""
    for one in folder.iterdir():
        if one.name.isdigit() and int(one.name) >= n_ranks:
            shutil.rmtree(one, ignore_errors=True)
