"""Sums over all ranks by the algorithms of the cost models, of messages between two ranks: to be timed, not to be fast.

`values`: float32 (n,), which become the sum on every rank.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor

Algorithm: TypeAlias = Callable[[Tensor, dist.ProcessGroup], None]


def all_reduce(values: Tensor, group: dist.ProcessGroup) -> None:
    """The backend's own."""
    dist.all_reduce(values, group=group)


def ring_sum(values: Tensor, group: dist.ProcessGroup) -> None:
    """A reduce-scatter and an all-gather around a ring."""
    n_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = values.tensor_split(n_ranks)
    got = values.new_empty(len(parts[0]))
    right, left = (rank + 1) % n_ranks, (rank - 1) % n_ranks
    for step in range(n_ranks - 1):
        part = parts[(rank - step - 1) % n_ranks]
        _exchange([(parts[(rank - step) % n_ranks], right)], [(got[: len(part)], left)], group)
        part += got[: len(part)]
    for step in range(n_ranks - 1):
        _exchange([(parts[(rank - step + 1) % n_ranks], right)], [(parts[(rank - step) % n_ranks], left)], group)


def tree_sum(values: Tensor, group: dist.ProcessGroup) -> None:
    """Up a binomial tree to rank 0, and down again."""
    n_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    got = values.new_empty(len(values))
    distances = [1 << level for level in range((n_ranks - 1).bit_length())]
    for distance in distances:
        if rank % (2 * distance) == distance:
            _exchange([(values, rank - distance)], [], group)
        elif rank % (2 * distance) == 0 and rank + distance < n_ranks:
            _exchange([], [(got, rank + distance)], group)
            values += got
    for distance in reversed(distances):
        if rank % (2 * distance) == 0 and rank + distance < n_ranks:
            _exchange([(values, rank + distance)], [], group)
        elif rank % (2 * distance) == distance:
            _exchange([], [(values, rank - distance)], group)


def server_sum(values: Tensor, group: dist.ProcessGroup) -> None:
    """Rank 0 is the one parameter server: it gets all vectors, and sends all the sum."""
    n_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank:
        _exchange([(values, 0)], [], group)
        _exchange([], [(values, 0)], group)
        return
    got = [values.new_empty(len(values)) for _ in range(1, n_ranks)]
    _exchange([], [(one, other) for other, one in enumerate(got, 1)], group)
    for one in got:
        values += one
    _exchange([(values, other) for other in range(1, n_ranks)], [], group)


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {"ring": ring_sum, "tree": tree_sum, "parameter server": server_sum}
)
"""By the name of their cost model."""


def _exchange(
    sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]], group: dist.ProcessGroup
) -> None:
    """Send and receive at the same time. Each tensor with the other rank."""
    operations = [dist.P2POp(dist.irecv, one, group=group, group_peer=rank) for one, rank in received if len(one)]
    operations += [dist.P2POp(dist.isend, one, group=group, group_peer=rank) for one, rank in sent if len(one)]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
