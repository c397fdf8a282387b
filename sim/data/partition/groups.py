"""Natural partitions: every client has what is its own, a role its lines, a hospital its patients."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from umbel.aggregation.phrases import some
from umbel.sim.data.partition.partition import Partition, shards_of


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
