"""A training in progress on several ranks: each rank saves its own shards, and all resume after the same step.

A rank may be killed while others have saved already. So each rank keeps its last two saves, and all resume from the
newest step that suffices for every rank. Another number of ranks resumes, too, if each rank can read all saves.
"""

import json
import logging
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

from torch import nn

from umbel.aggregation.phrases import agreeing
from umbel.client.datacenter.ranks.group import Group
from umbel.client.datacenter.silo.saved_shards import with_shards, without_shards
from umbel.client.local.batches import BatchPart
from umbel.client.local.checkpoint import Checkpoint
from umbel.client.local.progress import measured_so_far
from umbel.client.state.checkpoint import CheckpointDamaged, DiskCheckpoint, read_checkpoint, remove_checkpoint

_SLOTS = range(2)
_RANK, _RANKS, _PART = "rank", "ranks", "part"  # beside what the training is of
log = logging.getLogger("umbel.client")


_Moment: TypeAlias = tuple[int, int]
"""The steps that were done, and the number of ranks: what saves that fit together have in common."""


class _OfAnother(Exception):
    """A save is of another training."""


@dataclass(frozen=True, slots=True)
class _RankSave:
    """What one of `n_ranks` ranks has saved after so many steps. `part`: its part of every batch."""

    rank: int
    n_ranks: int
    part: str
    slot: int
    state: dict[str, Any] = field(repr=False)

    @property
    def moment(self) -> _Moment:
        return int(self.state["steps_done"]), self.n_ranks


class RankCheckpoint(Checkpoint):
    """The checkpoint of one rank. All ranks must call `save`, `load` and `fits_all` together."""

    def __init__(
        self,
        folder: Path,
        belongs_to: Mapping[str, str],
        model: nn.Module,
        ranks: Group,
        part: BatchPart,
        n_bytes: int,
        *,
        is_staged: bool = False,
    ) -> None:
        """`folder`: has a folder for each rank. `part`: this rank's of every batch. `n_bytes`: of this rank's tensors,
        for an estimate of the first save. `is_staged`: whether ranks hold different parts of the model.
        """
        self._folder, self._belongs_to, self._model = folder, dict(belongs_to), model
        self._ranks, self._part, self._is_staged = ranks, part, is_staged
        own = {_RANK: str(ranks.rank), _RANKS: str(ranks.size), _PART: _told(part)}
        self._slots = [
            DiskCheckpoint(_path(folder, ranks.rank, number), {**belongs_to, **own}, n_bytes) for number in _SLOTS
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
        self._slots[self._next].save(cast(dict[str, object], without_shards(state, self._model)))
        self._next = 1 - self._next

    def load(self) -> dict[str, Any] | None:
        found = self._readable()
        usable = [moment for moment, saves in found.items() if self._suffice(moment, saves)]
        by_rank = [_moments(one) for one in self._ranks.gather(json.dumps(usable).encode())]
        common = set.intersection(*by_rank)
        if not common:
            if self._ranks.is_first:
                self._tell_of_unused(found, by_rank)
            return None
        saves = found[max(common, key=lambda moment: (moment[0], moment[1] == self._ranks.size))]
        if (own := saves.get(self._ranks.rank)) is not None:
            self._next = 1 - own.slot  # the newest save stays until the next one is whole
        try:
            state = self._resumed(saves)
        except (KeyError, TypeError, ValueError) as error:
            log.warning("saves do not fit together (%s); training starts from the beginning", error)
            state = None
        return state if self.fits_all(state is not None) else None

    def fits_all(self, fits: bool) -> bool:
        return all(json.loads(one) for one in self._ranks.gather(json.dumps(fits).encode()))

    def forget(self) -> None:
        for slot in self._slots:
            slot.forget()
        for number, folder in _folders(self._folder):
            if number >= self._ranks.size:
                shutil.rmtree(folder, ignore_errors=True)

    def _readable(self) -> dict[_Moment, dict[int, _RankSave]]:
        """By moment and rank, what this rank can read of this training. What is of no use is removed: by each rank in
        its own folder, and by rank 0 in those of ranks that are no more.
        """
        found = defaultdict[_Moment, dict[int, _RankSave]](dict)
        for number, _ in _folders(self._folder):
            is_mine = number == self._ranks.rank or (self._ranks.is_first and number >= self._ranks.size)
            for slot in _SLOTS:
                path = _path(self._folder, number, slot)
                try:
                    if (save := _save_in(path, slot, self._belongs_to)) is not None:
                        found[save.moment][save.rank] = save
                except _OfAnother:
                    if is_mine:
                        remove_checkpoint(path)
                except (CheckpointDamaged, KeyError, TypeError, ValueError) as error:
                    if is_mine:
                        log.warning("the save %s is damaged (%s), and is removed", path, error)
                        remove_checkpoint(path)
        return found

    def _suffice(self, moment: _Moment, saves: Mapping[int, _RankSave]) -> bool:
        """Whether this rank could resume from these saves."""
        _, n_ranks = moment
        if n_ranks == self._ranks.size:
            return (own := saves.get(self._ranks.rank)) is not None and own.part == _told(self._part)
        is_whole = len(saves) == n_ranks and all(rank in saves for rank in range(n_ranks))
        return is_whole and not self._is_staged

    def _resumed(self, saves: Mapping[int, _RankSave]) -> dict[str, Any]:
        """This rank's state, made of these saves."""
        rank, size = self._ranks.rank, self._ranks.size
        n_ranks = next(iter(saves.values())).n_ranks
        if n_ranks == size:
            return cast(dict[str, Any], with_shards(saves[rank].state, [saves[rank].state], self._model))
        base, parts = saves[rank % n_ranks].state, dict[str, dict[str, Any]]()
        for number in range(n_ranks):
            parts.setdefault(saves[number].part, saves[number].state)
        measured = measured_so_far([*parts.values()], takes_sums=self._part.index == 0)
        whole = {**base, **measured}
        log.info("the saves of %d %s are divided among %d", n_ranks, agreeing(n_ranks, "rank", "ranks"), size)
        return cast(dict[str, Any], with_shards(whole, [one.state for one in saves.values()], self._model))

    def _tell_of_unused(self, found: Mapping[_Moment, object], by_rank: Sequence[set[_Moment]]) -> None:
        """On rank 0: log why the saves that are there cannot be used. `by_rank`: what suffices for each rank."""
        without = [self._ranks.names.of(rank) for rank, usable in enumerate(by_rank) if not usable]
        if not found and len(without) == len(by_rank):
            return
        if not without:
            why = "the ranks have none of the same step"
        elif self._is_staged:
            why = "a pipeline goes on only with as many ranks as before, each with its own save"
        else:
            why = f"{', '.join(without)} cannot read all that this takes"
        log.warning("this training was saved, but the saves cannot be used (%s); it starts from the beginning", why)


def _save_in(path: Path, slot: int, belongs_to: Mapping[str, str]) -> _RankSave | None:
    """What is saved there; None without a file. Raises `_OfAnother`, and `CheckpointDamaged`,
    `KeyError`, `TypeError` or `ValueError` for a damaged file.
    """
    if (found := read_checkpoint(path)) is None:
        return None
    belongs, state = found
    if not belongs_to.items() <= belongs.items():
        raise _OfAnother
    return _RankSave(int(belongs[_RANK]), int(belongs[_RANKS]), belongs[_PART], slot, state)


def _told(part: BatchPart) -> str:
    return f"{part.index} of {part.count}"


def _path(folder: Path, rank: int, slot: int) -> Path:
    return folder / str(rank) / f"{slot}.checkpoint.safetensors"


def _folders(folder: Path) -> Iterator[tuple[int, Path]]:
    """The folder of each rank that this machine knows, by its number."""
    for one in sorted(folder.iterdir()):
        if one.name.isdecimal():
            yield int(one.name), one


def _moments(text: bytes) -> set[_Moment]:
    return {(step, n_ranks) for step, n_ranks in json.loads(text)}
