"""The two trees of a double binary tree. That sums over them are right is tested in real groups, in `test_sums.py`."""

import pytest

from umbel.client.datacenter.doctor.double_tree import BinaryTree, two_trees


def inner(tree: BinaryTree) -> set[int]:
    """The ranks that have children."""
    return {parent for parent in tree.parents if parent is not None}


@pytest.mark.parametrize("n_ranks", range(1, 65))
def test_both_trees_reach_all_ranks_with_the_least_height_and_no_rank_is_inside_of_both(n_ranks: int) -> None:
    trees = two_trees(n_ranks)
    for tree in trees:
        assert len(tree.parents) == n_ranks
        assert tree.parents.count(None) == 1, "one root"
        assert all(len(tree.children(rank)) <= 2 for rank in range(n_ranks))
        assert tree.height == n_ranks.bit_length() - 1, "floor(log2 P), and no cycle, in which a depth has no end"
    assert not inner(trees[0]) & inner(trees[1])


def test_six_ranks_are_mirrored_and_five_are_shifted() -> None:
    assert [one.parents for one in two_trees(6)] == [(1, 3, 1, None, 5, 3), (2, 0, None, 4, 2, 4)]
    assert [one.parents for one in two_trees(5)] == [(1, 3, 1, None, 3), (4, 2, 4, 2, None)]
    assert [one.parents for one in two_trees(2)] == [(1, None), (None, 0)]


def test_a_rank_knows_its_place() -> None:
    tree, _ = two_trees(6)
    assert tree.children(3) == (1, 5)
    assert tree.children(5) == (4,)
    assert tree.children(0) == ()
    assert [tree.depth(rank) for rank in (3, 1, 4)] == [0, 1, 2]
