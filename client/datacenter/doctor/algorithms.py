"""Sums over all ranks by the algorithms of the cost models, of messages between two ranks: to be timed, not to be fast.

`values`: float32 (n,), which become the sum on every rank.

Over Gloo a sender waits until it is asked for a long message, and the request takes its turn behind what the receiver
itself sends. So every rank asks for what it will get before it sends. If two ranks send first and ask then, they
exchange vectors one after the other, which takes twice as long.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from umbel.client.datacenter.doctor.double_tree import double_tree_sum
from umbel.client.datacenter.doctor.messages import Parts, begun, can_ask_early, exchange

Algorithm: TypeAlias = Callable[[Tensor, dist.ProcessGroup], None]


def all_reduce(values: Tensor, group: dist.ProcessGroup) -> None:
    """The backend's own."""
    dist.all_reduce(values, group=group)


def ring_sum(values: Tensor, group: dist.ProcessGroup) -> None:
    """A reduce-scatter and an all-gather around a ring: in round t a rank sends part (rank - t) to its right."""
    _around_ring(values, group, range(dist.get_world_size(group)))


def tree_sum(values: Tensor, group: dist.ProcessGroup) -> None:
    """Up a binomial tree to rank 0, and down again."""
    ranks = range(dist.get_world_size(group))
    _up_tree(values, group, ranks)
    _down_tree(values, group, ranks)


def two_level_sum(values: Tensor, group: dist.ProcessGroup, hosts: Sequence[str]) -> None:
    """Up a binomial tree on each host to its first rank, around a ring of these ranks, and down the trees again.

    `hosts`: of each rank.
    """
    rank, by_host = dist.get_rank(group), dict[str, list[int]]()
    for other, host in enumerate(hosts):
        by_host.setdefault(host, []).append(other)
    neighbours = by_host[hosts[rank]]
    _up_tree(values, group, neighbours)
    if rank == neighbours[0]:
        _around_ring(values, group, [ranks[0] for ranks in by_host.values()])
    _down_tree(values, group, neighbours)


def server_sum(values: Tensor, group: dist.ProcessGroup) -> None:
    """Rank 0 is the one parameter server: it gets all vectors, and sends all the sum."""
    n_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank:
        exchange([(values, 0)], [], group)
        exchange([], [(values, 0)], group)
        return
    got = [values.new_empty(len(values)) for _ in range(1, n_ranks)]
    exchange([], [(one, other) for other, one in enumerate(got, 1)], group)
    for one in got:
        values += one
    exchange([(values, other) for other in range(1, n_ranks)], [], group)


def doubling_sum(values: Tensor, group: dist.ProcessGroup) -> None:
    """A butterfly for short vectors: in each round two ranks exchange all they have."""
    got = torch.empty_like(values)

    def butterfly(rank: int, n_ranks: int) -> None:
        for distance in _distances(n_ranks):
            exchange([(values, rank ^ distance)], [(got, rank ^ distance)], group)
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
            exchange([(theirs, rank ^ distance)], [(got[: len(own)], rank ^ distance)], group)
            own.add_(got[: len(own)])
            rounds.append((distance, own, theirs))
        for distance, mine, theirs in reversed(rounds):
            exchange([(mine, rank ^ distance)], [(theirs, rank ^ distance)], group)

    _with_ranks_beyond(values, got, group, butterfly)


def algorithms(hosts: Sequence[str], n_pieces: int) -> Mapping[str, Algorithm]:
    """By the name of their cost model. `hosts`: of each rank. `n_pieces`: of each half of the double tree's vector."""
    return {
        "ring": ring_sum,
        "tree": tree_sum,
        "double binary tree": partial(double_tree_sum, n_pieces=n_pieces),
        "recursive doubling": doubling_sum,
        "halving and doubling": halving_sum,
        "parameter server": server_sum,
        "two-level": partial(two_level_sum, hosts=hosts),
    }


def _around_ring(values: Tensor, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Over Gloo each part is asked for one round early, before the part of this round fills the queue."""
    n_ranks, place = len(ranks), ranks.index(dist.get_rank(group))
    parts, rounds = values.tensor_split(n_ranks), 2 * (n_ranks - 1)
    got = [torch.empty_like(parts[0]) for _ in range(2)]
    left, right = ranks[(place - 1) % n_ranks], ranks[(place + 1) % n_ranks]

    def received(number: int) -> Tensor:
        """Where a rank receives what its left sends in this round: to add it, or as it is."""
        part = parts[(place - number - 1) % n_ranks]
        return got[number % 2][: len(part)] if number < n_ranks - 1 else part

    def asked_for(number: int) -> Parts:
        return [(received(number), left)] if number < rounds else []

    is_early = can_ask_early(group)
    asked = begun([], asked_for(0), group) if is_early else []
    for number in range(rounds):
        early = begun([], asked_for(number + 1), group) if is_early else []
        sent = [(parts[(place - number) % n_ranks], right)]
        for work in [*asked, *begun(sent, [] if is_early else asked_for(number), group)]:
            work.wait()
        if number < n_ranks - 1:
            parts[(place - number - 1) % n_ranks].add_(received(number))
        asked = early


def _up_tree(values: Tensor, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """The first of `ranks` gets the sum. `values` of the others become parts of it."""
    n_ranks, place = len(ranks), ranks.index(dist.get_rank(group))
    got = values.new_empty(len(values))
    for distance in _distances(n_ranks):
        if place % (2 * distance) == distance:
            exchange([(values, ranks[place - distance])], [], group)
        elif place % (2 * distance) == 0 and place + distance < n_ranks:
            exchange([], [(got, ranks[place + distance])], group)
            values += got


def _down_tree(values: Tensor, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """All `ranks` get the values of the first."""
    n_ranks, place = len(ranks), ranks.index(dist.get_rank(group))
    for distance in reversed(_distances(n_ranks)):
        if place % (2 * distance) == 0 and place + distance < n_ranks:
            exchange([(values, ranks[place + distance])], [], group)
        elif place % (2 * distance) == distance:
            exchange([], [(values, ranks[place - distance])], group)


def _with_ranks_beyond(
    values: Tensor, got: Tensor, group: dist.ProcessGroup, butterfly: Callable[[int, int], None]
) -> None:
    """A butterfly of the largest power of two of ranks; each further rank gives its vector to one of them before, and
    gets the sum from it. `butterfly`: called with a rank and the number of ranks.
    """
    n_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    n_inside = 1 << n_ranks.bit_length() - 1
    if rank >= n_inside:
        exchange([(values, rank - n_inside)], [], group)
        exchange([], [(values, rank - n_inside)], group)
        return
    has_other = rank + n_inside < n_ranks
    if has_other:
        exchange([], [(got, rank + n_inside)], group)
        values.add_(got)
    butterfly(rank, n_inside)
    if has_other:
        exchange([(values, rank + n_inside)], [], group)


def _distances(n_ranks: int) -> list[int]:
    """1, 2, 4 ... below `n_ranks`."""
    return [1 << level for level in range((n_ranks - 1).bit_length())]
