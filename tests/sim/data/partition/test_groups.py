"""Natural partitions: each client has its own, and is called by its name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.sim.data.partition.partition import natural_partition


@given(st.lists(st.integers(0, 9), min_size=1, max_size=80), st.integers(1, 4))
def test_every_large_enough_group_is_a_client_with_all_its_samples(known: list[int], least: int) -> None:
    groups = np.array(known)
    large = [group for group in range(10) if known.count(group) >= least]
    if not large:
        with pytest.raises(ValueError, match="can give 0 clients, not 1"):
            natural_partition(groups, least, None, np.random.default_rng(0))
        return
    partition = natural_partition(groups, least, None, np.random.default_rng(0), names=list("abcdefghij"))
    assert partition.names == tuple("abcdefghij"[group] for group in large)
    assert [shard.tolist() for shard in partition.shards] == [np.flatnonzero(groups == g).tolist() for g in large]


def test_groups_may_be_words() -> None:
    partition = natural_partition(np.array(["b", "a", "b"]), 1, None, np.random.default_rng(0))
    assert partition.names == ("a", "b")
    assert [shard.tolist() for shard in partition.shards] == [[1], [0, 2]]


def test_some_groups_are_drawn_and_the_seed_says_which() -> None:
    groups = np.arange(300) % 30
    chosen = [natural_partition(groups, 1, 5, np.random.default_rng(seed)).names for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert chosen[0] is not None
    assert len(set(chosen[0])) == 5


def test_only_the_groups_that_are_named_are_clients() -> None:
    groups = np.array([2, 0, 1, 2])
    partition = natural_partition(
        groups, 1, None, np.random.default_rng(0), ["north", "east", "south"], ["south", "north"]
    )
    assert partition.names == ("north", "south")
    assert [shard.tolist() for shard in partition.shards] == [[1], [0, 3]]
    with pytest.raises(ValueError, match=r"there is no group west; the groups are north, east, south"):
        natural_partition(groups, 1, None, np.random.default_rng(0), ["north", "east", "south"], ["west", "east"])


def test_too_few_groups_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"2 groups \(a, b\) can give 1 client, not 2: a group needs at least 2 samples"
    ):
        natural_partition(np.array(["b", "a", "b"]), 2, 2, np.random.default_rng(0))
