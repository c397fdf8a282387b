"""Sums over all ranks by the algorithms of the cost models, of messages between two ranks: to be timed, not to be fast.

`values`: float32 (n,), which become the sum on every rank.

Over Gloo a sender waits until it is asked for a long message, and the request takes its turn behind what the receiver
itself sends. So every rank asks for what it will get before it sends. If two ranks send first and ask then, they
exchange vectors one after the other, which takes twice as long.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

Algorithm: TypeAlias = Callable[[Tensor, dist.ProcessGroup], None]


def all_reduce(values: Tensor, group: dist.ProcessGroup) -> None:
    """The backend's own."""
    dist.all_reduce(values, group=group)


def ring_sum(values: Tensor, group: dist.ProcessGroup) -> None:
    """A reduce-scatter and an all-gather around a ring: in round t a rank sends part (rank - t) to its right.

    Over Gloo each part is asked for one round early, before the part of this round fills the queue. NCCL does these in
    their order, and would hang.
    """
    n_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    parts, rounds = values.tensor_split(n_ranks), 2 * (n_ranks - 1)
    got = [torch.empty_like(parts[0]) for _ in range(2)]

    def place(number: int) -> Tensor:
        """Where a rank receives what its left sends in this round: to add it, or as it is."""
        part = parts[(rank - number - 1) % n_ranks]
        return got[number % 2][: len(part)] if number < n_ranks - 1 else part

    def received(number: int) -> list[dist.P2POp]:
        return _operations([], [(place(number), (rank - 1) % n_ranks)], group) if number < rounds else []

    is_early = dist.get_backend(group) == "gloo"
    asked = _begun(received(0)) if is_early else []
    for number in range(rounds):
        sent = _operations([(parts[(rank - number) % n_ranks], (rank + 1) % n_ranks)], [], group)
        early = _begun(received(number + 1)) if is_early else []
        under_way = [*asked, *_begun(sent if is_early else [*received(number), *sent])]
        for work in under_way:
            work.wait()
        if number < n_ranks - 1:
            parts[(rank - number - 1) % n_ranks].add_(place(number))
        asked = early


def tree_sum(values: Tensor, group: dist.ProcessGroup) -> None:
    """Up a binomial tree to rank 0, and down again."""
    n_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    got = values.new_empty(len(values))
    distances = _distances(n_ranks)
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


def doubling_sum(values: Tensor, group: dist.ProcessGroup) -> None:
    """A butterfly for short vectors: in each round two ranks exchange all they have."""
    got = torch.empty_like(values)

    def butterfly(rank: int, n_ranks: int) -> None:
        for distance in _distances(n_ranks):
            _exchange([(values, rank ^ distance)], [(got, rank ^ distance)], group)
            values.add_(got)

    _with_ranks_beyond(values, got, group, butterfly)


def halving_sum(values: Tensor, group: dist.ProcessGroup) -> None:
    """A butterfly for long vectors: two ranks exchange halves of what they are responsible for, and the sums of these
    halves on the way back.
    """
    got = torch.empty_like(values)

    def butterfly(rank: int, n_ranks: int) -> None:
        own, rounds = values, list[tuple[int, Tensor, Tensor]]()
        for distance in reversed(_distances(n_ranks)):
            low, high = own.tensor_split(2)
            own, theirs = (high, low) if rank & distance else (low, high)
            _exchange([(theirs, rank ^ distance)], [(got[: len(own)], rank ^ distance)], group)
            own.add_(got[: len(own)])
            rounds.append((distance, own, theirs))
        for distance, mine, theirs in reversed(rounds):
            _exchange([(mine, rank ^ distance)], [(theirs, rank ^ distance)], group)

    _with_ranks_beyond(values, got, group, butterfly)


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "ring": ring_sum,
        "tree": tree_sum,
        "recursive doubling": doubling_sum,
        "halving and doubling": halving_sum,
        "parameter server": server_sum,
    }
)
"""By the name of their cost model."""


def _with_ranks_beyond(
    values: Tensor, got: Tensor, group: dist.ProcessGroup, butterfly: Callable[[int, int], None]
) -> None:
    """A butterfly of the largest power of two of ranks; each further rank gives its vector to one of them before, and
    gets the sum from it. `butterfly`: called with a rank and the number of ranks.
    """
    n_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    n_inside = 1 << n_ranks.bit_length() - 1
    if rank >= n_inside:
        _exchange([(values, rank - n_inside)], [], group)
        _exchange([], [(values, rank - n_inside)], group)
        return
    has_other = rank + n_inside < n_ranks
    if has_other:
        _exchange([], [(got, rank + n_inside)], group)
        values.add_(got)
    butterfly(rank, n_inside)
    if has_other:
        _exchange([(values, rank + n_inside)], [], group)


def _distances(n_ranks: int) -> list[int]:
    """1, 2, 4 ... below `n_ranks`."""
    return [1 << level for level in range((n_ranks - 1).bit_length())]


_Parts: TypeAlias = Sequence[tuple[Tensor, int]]  # each with the other rank


def _exchange(sent: _Parts, received: _Parts, group: dist.ProcessGroup) -> None:
    """Send and receive at the same time."""
    for work in _begun(_operations(sent, received, group)):
        work.wait()


def _operations(sent: _Parts, received: _Parts, group: dist.ProcessGroup) -> list[dist.P2POp]:
    """Receptions come first: a rank asks for what it will get before it fills the network with what it sends."""
    found = [dist.P2POp(dist.irecv, one, group=group, group_peer=rank) for one, rank in received if len(one)]
    return found + [dist.P2POp(dist.isend, one, group=group, group_peer=rank) for one, rank in sent if len(one)]


def _begun(operations: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(operations) if operations else []
