"""How one data set is dealt out: which client holds which samples, and how many of each class.

`labels.py` deals by label and `sizes.py` by size, as the `[partition]` section of an experiment's file (`section.py`)
says.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from umbel.aggregation.phrases import some

Labels = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64]


class Transform(Protocol):
    """What makes clients' inputs differ: a sensor's noise, how a camera is held."""

    def __call__(self, inputs: Tensor, clients: Indices, starts: Indices, *, are_held_back: bool) -> Tensor:
        """The inputs of these clients, changed, for which `inputs` may be written over.

        The i-th of `clients` (numbers) holds `inputs[starts[i]:starts[i + 1]]`, in training data or in what it holds
        back; it sees the same whenever it is asked, whoever is asked with it. Raises `ValueError` for inputs that it
        cannot change.
        """
        ...


@dataclass(frozen=True, slots=True)
class Partition:
    """`shards`: of each client the indices of the samples that it trains on, ascending; none is in two.

    `holdouts`: of each client the indices that it holds back to measure models on, in no shard; None: no client does.
    `names`: of the clients, where they have some (hospitals, roles).
    """

    shards: tuple[Indices, ...]
    holdouts: tuple[Indices, ...] | None = None
    names: tuple[str, ...] | None = None

    @property
    def n_clients(self) -> int:
        return len(self.shards)

    @property
    def sizes(self) -> Indices:
        """How many samples each client trains on."""
        return np.array([len(shard) for shard in self.shards], dtype=np.int64)


def shards_of(owners: Indices, n_clients: int) -> tuple[Indices, ...]:
    """The indices that each client holds, ascending. `owners`: of each sample its client, -1 for nobody."""
    order = np.argsort(owners, kind="stable").astype(np.int64)
    ends = np.cumsum(np.bincount(owners + 1, minlength=n_clients + 1))
    return tuple(np.split(order, ends)[1:-1])


def with_holdouts(partition: Partition, share: float, seed: int) -> Partition:
    """Of each client's samples this share, drawn, is held back, rounded; at least one stays to train on.

    `share` 0: as it was. Raises `ValueError` if the share is not in [0, 1), or if there are holdouts already.
    """
    if not 0 <= share < 1:
        raise ValueError(f"holdout, the share that each client holds back, must lie in [0, 1), not {share}")
    if share == 0:
        return partition
    if partition.holdouts is not None:
        raise ValueError("these clients hold samples back already; leave holdout out")
    sizes = partition.sizes
    n_held = np.clip(np.rint(share * sizes).astype(np.int64), 0, np.maximum(sizes - 1, 0))
    owners = np.repeat(np.arange(partition.n_clients), sizes)
    is_held = drawn_of_each(owners, n_held, np.random.default_rng(seed))
    rows, ends = np.concatenate(partition.shards), np.cumsum(n_held)[:-1]
    shards = np.split(rows[~is_held], np.cumsum(sizes - n_held)[:-1])
    return replace(partition, shards=tuple(shards), holdouts=tuple(np.split(rows[is_held], ends)))


def drawn_of_each(owners: Indices, wanted: Indices, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """A mask of the samples, with as many as are `wanted` of each owner, drawn evenly. Owners are from 0 on."""
    order = np.lexsort((rng.random(len(owners)), owners))
    sizes = np.bincount(owners, minlength=len(wanted))
    rank = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    mask = np.zeros(len(owners), dtype=np.bool_)
    mask[order] = rank < wanted[owners[order]]
    return mask


def class_counts(labels: Labels, shards: Sequence[Indices], classes: Labels | None = None) -> Indices:
    """How many samples of each class each client holds: shape (clients, classes).

    `classes`: which to count, ascending; by default all that are in `labels`.
    """
    classes = np.unique(labels) if classes is None else classes
    owners = np.repeat(np.arange(len(shards)), [len(shard) for shard in shards])
    held = np.searchsorted(classes, labels[np.concatenate([np.empty(0, dtype=np.int64), *shards])])
    counts = np.bincount(owners * len(classes) + held, minlength=len(shards) * len(classes))
    return counts.reshape(len(shards), len(classes)).astype(np.int64)


def natural_partition(
    groups: npt.NDArray[Any],
    least: int,
    n_clients: int | None,
    rng: np.random.Generator,
    names: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
) -> Partition:
    """One client per group, in ascending order of the groups. `groups`: of each sample, numbers or words.

    Groups with fewer than `least` samples are left out. `n_clients`: that many of the others, drawn evenly; None for
    all. `names`: of groups that are numbers, by number; by default they are called by their number. `only`: the names
    of those that take part; None for all. Raises `ValueError` if there are too few groups, or none of a name.
    """
    found, members, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    called: list[str] = [str(group) if names is None else str(names[group]) for group in found]
    if only is not None and (unknown := sorted(set(only) - set(called))):
        raise ValueError(f"there is no group {', '.join(unknown)}; there are {some(called)}")
    kept = np.flatnonzero((sizes >= least) & np.array([only is None or name in only for name in called]))
    wanted = 1 if n_clients is None else n_clients
    if len(kept) < wanted:
        raise ValueError(
            f"{len(kept)} of {len(found)} groups ({some(called)}) hold at least {least} samples, {wanted} must; "
            "take fewer clients, or ask for fewer samples of each"
        )
    if n_clients is not None:
        kept = np.sort(rng.choice(kept, n_clients, replace=False))
    client_of = np.full(len(found), -1, dtype=np.int64)
    client_of[kept] = np.arange(len(kept))
    return Partition(shards_of(client_of[members], len(kept)), names=tuple(called[group] for group in kept))
