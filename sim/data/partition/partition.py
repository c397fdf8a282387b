"""How one data set is dealt out: which client holds which samples, and how many of each class.

`partition_labels.py` deals by label, `partition_sizes.py` by size, `partition_groups.py` by whose the samples are; the
`[partition]` section of an experiment's file (`partition_section.py`) says which.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Labels = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64]


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
