"""Shards, holdouts and counts: every sample is where it is said to be, once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.sim.data.partition.partition import Partition, class_counts, drawn_of_each, shards_of, with_holdouts

owners_of = st.integers(1, 8).flatmap(
    lambda n: st.tuples(st.just(n), st.lists(st.integers(-1, n - 1), max_size=60).map(lambda x: np.array(x, np.int64)))
)


@given(owners_of)
def test_a_shard_is_what_its_client_owns_in_ascending_order(case: tuple[int, np.ndarray]) -> None:
    n_clients, owners = case
    shards = shards_of(owners, n_clients)
    assert [shard.tolist() for shard in shards] == [np.flatnonzero(owners == k).tolist() for k in range(n_clients)]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.floats(0, 0.99), st.integers(0, 1 << 62))
def test_a_holdout_is_its_share_of_each_client_and_leaves_it_something(
    sizes: list[int], share: float, seed: int
) -> None:
    shards = shards_of(np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes)), len(sizes))
    names = tuple(map(str, sizes))
    partition = with_holdouts(Partition(shards, names=names), share, seed)
    again = with_holdouts(Partition(shards, names=names), share, seed)
    assert partition.names == names
    if share == 0:
        assert partition.holdouts is None
        return
    assert partition.holdouts is not None
    assert again.holdouts is not None
    assert all(np.array_equal(a, b) for a, b in zip(partition.holdouts, again.holdouts, strict=True))
    for before, kept, held in zip(shards, partition.shards, partition.holdouts, strict=True):
        assert sorted([*kept.tolist(), *held.tolist()]) == before.tolist()
        assert np.array_equal(kept, np.sort(kept))
        assert len(held) == min(round(share * len(before)), len(before) - 1)


def test_holdouts_are_drawn_not_cut_off() -> None:
    shards = (np.arange(1000, dtype=np.int64),)
    held = [with_holdouts(Partition(shards), 0.2, seed).holdouts for seed in range(2)]
    assert held[0] is not None
    assert held[1] is not None
    assert not np.array_equal(held[0][0], held[1][0])
    assert 400 < held[0][0].mean() < 600


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_that_leaves_nothing_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="holdout"):
        with_holdouts(Partition((np.arange(3),)), share, 0)


def test_what_is_held_back_already_is_not_split_again() -> None:
    once = with_holdouts(Partition((np.arange(10),)), 0.5, 0)
    with pytest.raises(ValueError, match="already"):
        with_holdouts(once, 0.5, 0)


def test_each_sample_of_an_owner_is_drawn_equally_often() -> None:
    owners, wanted = np.array([1, 0, 0, 1, 0, 0, 2]), np.array([1, 2, 0])
    drawn = np.zeros(7)
    for seed in range(4000):
        mask = drawn_of_each(owners, wanted, np.random.default_rng(seed))
        assert np.bincount(owners[mask], minlength=3).tolist() == wanted.tolist()
        drawn += mask
    assert np.allclose(drawn / 4000, [1, 0.25, 0.25, 1, 0.25, 0.25, 0], atol=0.04)


@given(owners_of, st.lists(st.integers(-2, 4), min_size=60, max_size=60))
def test_classes_are_counted_client_by_client(case: tuple[int, np.ndarray], known: list[int]) -> None:
    n_clients, owners = case
    labels = np.array(known, dtype=np.int64)
    shards = shards_of(owners, n_clients)
    classes = np.unique(labels)
    expected = [[int((labels[shard] == c).sum()) for c in classes] for shard in shards]
    assert class_counts(labels, shards).tolist() == expected
    more = class_counts(labels, shards, np.append(classes, 9))
    assert more.tolist() == [[*row, 0] for row in expected], "a class that nobody has is counted as well"
