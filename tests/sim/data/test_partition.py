"""A partition is a partition, and its skew is what was asked for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.sim.data.partition import DirichletSplit, class_counts, dirichlet_partition, shard_partition

splits = st.builds(
    DirichletSplit,
    n_clients=st.integers(1, 20),
    alpha=st.floats(1e-3, 1e3),
    size_alpha=st.none() | st.floats(1e-2, 1e2),
    min_samples=st.integers(0, 5),
)


@given(splits, st.lists(st.integers(-3, 12), min_size=100, max_size=400), st.integers(0, 1 << 63))
def test_every_sample_is_in_exactly_one_shard_and_every_client_has_its_minimum(
    split: DirichletSplit, labels: list[int], seed: int
) -> None:
    shards = dirichlet_partition(np.array(labels, dtype=np.int64), split, seed)
    assert len(shards) == split.n_clients
    assert sorted(np.concatenate(shards).tolist()) == list(range(len(labels)))
    assert min(map(len, shards)) >= split.min_samples
    assert [len(shard) for shard in shards] == sorted(map(len, shards), reverse=True)


@given(splits, st.integers(0, 1 << 63))
def test_the_same_seed_gives_the_same_split(split: DirichletSplit, seed: int) -> None:
    labels = np.arange(120, dtype=np.int64) % 7
    first, second = (dirichlet_partition(labels, split, seed) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_sizes_are_equal_up_to_one_when_no_size_skew_is_asked_for() -> None:
    labels = np.arange(1000, dtype=np.int64) % 10
    sizes = {len(shard) for shard in dirichlet_partition(labels, DirichletSplit(12, alpha=0.3), 0)}
    assert sizes == {83, 84}


@pytest.mark.parametrize(("alpha", "low", "high"), [(1e-3, 0.75, 1.0), (1e5, 0.1, 0.2)])
def test_a_small_alpha_gives_one_class_each_and_a_large_one_the_mixture_of_the_whole(
    alpha: float, low: float, high: float
) -> None:
    labels = np.arange(10_000, dtype=np.int64) % 10
    shards = dirichlet_partition(labels, DirichletSplit(10, alpha), seed=1)
    counts = class_counts(labels, shards)
    greatest_share = float((counts.max(1) / counts.sum(1)).mean())
    assert low <= greatest_share <= high


def test_class_counts_add_up_to_the_whole() -> None:
    labels = np.array([3, 3, 5, 7, 7, 7], dtype=np.int64)
    counts = class_counts(labels, dirichlet_partition(labels, DirichletSplit(2, 1.0), 0))
    assert counts.sum(0).tolist() == [2, 1, 3]


def test_too_few_samples_for_the_minimum_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        dirichlet_partition(np.zeros(9, dtype=np.int64), DirichletSplit(5, 1.0, min_samples=2), 0)


@pytest.mark.parametrize("bad", [{"n_clients": 0}, {"alpha": 0.0}, {"size_alpha": -1.0}, {"min_samples": -1}])
def test_a_split_that_makes_no_sense_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        DirichletSplit(**{"n_clients": 2, "alpha": 1.0, **bad})  # type: ignore[arg-type]  # wrong on purpose


@given(
    st.integers(1, 20), st.integers(1, 5), st.lists(st.integers(-3, 12), min_size=100, max_size=400), st.integers(0, 99)
)
def test_shards_hold_every_sample_once_and_few_labels_each(
    n_clients: int, shards_each: int, labels: list[int], seed: int
) -> None:
    known = np.array(labels, dtype=np.int64)
    hands = shard_partition(known, n_clients, shards_each, seed)
    again = shard_partition(known, n_clients, shards_each, seed)
    assert len(hands) == n_clients
    assert sorted(np.concatenate(hands).tolist()) == list(range(len(labels)))
    assert all(np.array_equal(a, b) for a, b in zip(hands, again, strict=True))
    assert max(map(len, hands)) - min(map(len, hands)) <= shards_each
    n_classes = len(np.unique(known))
    labels_in_shards = (class_counts(known, hands) > 0).sum()
    assert labels_in_shards <= n_clients * shards_each + n_classes - 1, "a cut within a label adds one, and no more"


def test_the_split_of_the_paper_leaves_most_clients_two_digits_of_300_each() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 6000)).astype(np.int64)
    hands = shard_partition(labels, 100, 2, seed=3)
    counts = class_counts(labels, hands)
    assert {len(hand) for hand in hands} == {600}
    assert set(counts.reshape(-1).tolist()) == {0, 300, 600}
    assert ((counts > 0).sum(1) == 2).sum() > 80
    other = shard_partition(labels, 100, 2, seed=4)
    assert any(not np.array_equal(a, b) for a, b in zip(hands, other, strict=True))


@pytest.mark.parametrize(("n_clients", "shards_each"), [(0, 2), (3, 0), (5, 2)])
def test_shards_that_cannot_be_cut_are_refused(n_clients: int, shards_each: int) -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        shard_partition(np.zeros(9, dtype=np.int64), n_clients, shards_each, 0)
