r"""A sum by two binary trees at once: each tree carries half of the vector, in pieces that follow one another.

    tree 1 of 6 ranks                tree 2: the mirror image (of an odd number of ranks: shifted by one rank)

          3                                2
        /   \                            /   \
       1     5                          0     4
      / \   /                            \   / \
     0   2 4                              1 3   5

In one binary tree half of the ranks are leaves, which pass no sum on. In the other tree these ranks are the inner
ones, so that every rank's link is busy both ways (Sanders, Speck and Träff 2009, section 3).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch.distributed as dist
from torch import Tensor

from umbel.client.datacenter.doctor.messages import Parts, begun, can_ask_early


@dataclass(frozen=True, slots=True)
class BinaryTree:
    """A tree whose nodes are the ranks."""

    parents: tuple[int | None, ...]  # of each rank; None for the root

    def children(self, rank: int) -> tuple[int, ...]:
        """The ranks below this one, at most two; none for a leaf."""
        return tuple(child for child, parent in enumerate(self.parents) if parent == rank)

    def depth(self, rank: int) -> int:
        """The number of edges between this rank and the root."""
        parent = self.parents[rank]
        return 0 if parent is None else 1 + self.depth(parent)

    @property
    def height(self) -> int:
        """The depth of the lowest leaf."""
        return max(map(self.depth, range(len(self.parents))))


def two_trees(n_ranks: int) -> tuple[BinaryTree, BinaryTree]:
    """Two trees of height floor(log2 P), in which each rank is an inner node at most once. `n_ranks`: P, from 1.

    In the first tree a node's left subtree has the ranks before it, and its right subtree those after it. So its inner
    nodes have odd ranks. In the second tree they have even ranks, because the mirror image (P even) swaps odd and even.
    A shift by one (P odd) does so too, except that rank 0 comes from the last rank, which is a leaf.
    """
    first = tuple(_parent(rank, n_ranks) for rank in range(n_ranks))
    second: list[int | None] = [None] * n_ranks
    for rank, parent in enumerate(first):
        second[_moved(rank, n_ranks)] = None if parent is None else _moved(parent, n_ranks)
    return BinaryTree(first), BinaryTree(tuple(second))


def double_tree_sum(values: Tensor, group: dist.ProcessGroup, n_pieces: int) -> None:
    """Up both trees at once to their roots, and then down both. `values`: (n,), becomes the sum on every rank.

    `n_pieces`: in which each half of the vector travels, from 1. In each round, a rank sends to its parent in both
    trees, or to both of its children in one tree, and receives as much.

    Over Gloo all receptions begin at the start, so that no request for a piece waits behind other pieces.
    """
    rank = dist.get_rank(group)
    halves = zip(two_trees(dist.get_world_size(group)), values.tensor_split(2), strict=True)
    places = [_PlaceInTree(tree, rank, half, n_pieces) for tree, half in halves]
    numbers = range(places[0].n_rounds)
    rounds = [_at_once([one.up(number) for one in places]) for number in numbers]
    rounds += [_at_once([one.down(number) for one in places]) for number in numbers]
    is_early = can_ask_early(group)
    asked = [begun([], one.received, group) if is_early else [] for one in rounds]
    for one, early in zip(rounds, asked, strict=True):
        for work in [*early, *begun(one.sent, [] if is_early else one.received, group)]:
            work.wait()
        for own, got in one.added:
            own.add_(got)


@dataclass(frozen=True, slots=True)
class _Round:
    """What one rank does in one round."""

    sent: Parts = ()
    received: Parts = ()
    added: Sequence[tuple[Tensor, Tensor]] = ()  # after the messages: the second of each pair to the first


def _at_once(rounds: Sequence[_Round]) -> _Round:
    """The same round of several trees."""
    sent, received, added = zip(*((one.sent, one.received, one.added) for one in rounds), strict=True)
    return _Round([*chain(*sent)], [*chain(*received)], [*chain(*added)])


class _PlaceInTree:
    """What one rank does in one tree: pieces of its half go up to the root, and their sums come down."""

    def __init__(self, tree: BinaryTree, rank: int, half: Tensor, n_pieces: int) -> None:
        self._parent, self._children = tree.parents[rank], tree.children(rank)
        self._depth, self._height = tree.depth(rank), tree.height
        self._pieces = half.tensor_split(n_pieces)
        self._got = {child: half.new_empty(len(half)).tensor_split(n_pieces) for child in self._children}

    @property
    def n_rounds(self) -> int:
        """The number of rounds in which all pieces go up; in as many rounds they come down."""
        return len(self._pieces) + self._height - 1

    def up(self, number: int) -> _Round:
        """A rank of depth d sends piece j in round j + height - d, one round after it came from the children."""
        sends, receives = number - self._height + self._depth, number - self._height + self._depth + 1
        got = [(self._got[child][receives], child) for child in self._children if self._has(receives)]
        return _Round(
            [(self._pieces[sends], self._parent)] if self._parent is not None and self._has(sends) else [],
            got,
            [(self._pieces[receives], one) for one, _ in got],
        )

    def down(self, number: int) -> _Round:
        """A rank of depth d sends the sum of piece j in round j + d, one round after it came from the parent."""
        sends, receives = number - self._depth, number - self._depth + 1
        return _Round(
            [(self._pieces[sends], child) for child in self._children if self._has(sends)],
            [(self._pieces[receives], self._parent)] if self._parent is not None and self._has(receives) else [],
        )

    def _has(self, piece: int) -> bool:
        return 0 <= piece < len(self._pieces)


def _parent(rank: int, n_ranks: int) -> int | None:
    """Nodes are numbered from 1. A node whose lowest bit is 2^l has the level l, and its parent the next level. If the
    parent would be beyond the last rank, the nearest ancestor that is not takes its place.
    """
    node = rank + 1
    if node == 1 << n_ranks.bit_length() - 1:
        return None
    while True:
        lowest = node & -node
        node = node ^ lowest | lowest << 1
        if node <= n_ranks:
            return node - 1


def _moved(rank: int, n_ranks: int) -> int:
    """The rank in the second tree's place of a rank in the first."""
    return (rank + 1) % n_ranks if n_ranks % 2 else n_ranks - 1 - rank
