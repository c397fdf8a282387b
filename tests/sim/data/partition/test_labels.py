"""A partition by label is a partition, and its skew is what was asked for."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.sim.data.partition.heterogeneity import LabelSkew, heterogeneity
from umbel.sim.data.partition.labels import (
    DirichletSplit,
    classes_partition,
    dirichlet_by_class,
    dirichlet_partition,
    shard_partition,
)
from umbel.sim.data.partition.partition import Indices, Labels, Partition, class_counts

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


@pytest.mark.parametrize("alpha", [0.1, 0.3])
def test_the_skew_of_the_dirichlet_split_is_what_the_distribution_says(alpha: float) -> None:
    """With ten equal classes a share of Dir(alpha p) is Beta(a, b), whose mean absolute deviation is known."""
    a, b = alpha / 10, alpha * 9 / 10
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    deviation = 2 * math.exp(a * math.log(a) + b * math.log(b) - log_beta - (a + b + 1) * math.log(a + b))
    labels = np.repeat(np.arange(10), 6000)
    split = [dirichlet_partition(labels, DirichletSplit(100, alpha), seed) for seed in range(5)]
    found = [_label_skew(labels, shards).total_variation_mean for shards in split]
    assert np.mean(found) == pytest.approx(10 * deviation / 2, abs=0.012)


@given(
    st.lists(st.integers(-3, 12), min_size=100, max_size=400),
    st.integers(1, 20),
    st.floats(1e-3, 1e3),
    st.integers(0, 5),
    st.booleans(),
    st.integers(0, 1 << 63),
)
def test_dirichlet_by_class_deals_every_sample_once_and_gives_each_client_its_least(
    known: list[int], n_clients: int, alpha: float, least: int, is_balanced: bool, seed: int
) -> None:
    labels = np.array(known, dtype=np.int64)
    shards, again = (
        dirichlet_by_class(labels, n_clients, alpha, least, is_balanced, np.random.default_rng(seed)) for _ in range(2)
    )
    assert len(shards) == n_clients
    assert sorted(np.concatenate(shards).tolist()) == list(range(len(labels)))
    assert min(map(len, shards)) >= least
    assert all(np.array_equal(a, b) for a, b in zip(shards, again, strict=True))


def test_sizes_under_dirichlet_by_class_are_as_unequal_as_the_distribution_says() -> None:
    """A client's share s is the mean of C draws x of Beta(alpha, (N - 1) alpha): E s^2 is known, so E sum s^2."""
    labels, n_clients, alpha = np.repeat(np.arange(10), 2000), 50, 0.5
    of_square = (alpha + 1) / (n_clients * (n_clients * alpha + 1))
    expected = n_clients * (of_square / 10 + 9 / 10 / n_clients**2)
    found = []
    for seed in range(40):
        sizes = _sizes(dirichlet_by_class(labels, n_clients, alpha, 0, False, np.random.default_rng(seed)))
        found.append(((sizes / sizes.sum()) ** 2).sum())
    assert np.mean(found) == pytest.approx(expected, rel=0.03)


def test_balancing_gives_nothing_more_to_who_has_got_as_much_as_the_mean() -> None:
    labels = np.random.default_rng(0).integers(0, 20, 20_000)
    greatest = [
        [
            _sizes(dirichlet_by_class(labels, 10, 0.1, 0, is_balanced, np.random.default_rng(seed))).max()
            for seed in range(9)
        ]
        for is_balanced in (False, True)
    ]
    assert max(greatest[True]) <= 2000 + np.bincount(labels).max(), "the mean, and then at most one class more"
    assert np.median(greatest[False]) > 2000 + np.bincount(labels).max()


def test_what_is_missing_to_the_least_comes_from_the_largest() -> None:
    labels = np.zeros(10_000, dtype=np.int64)
    without, raised = (
        _sizes(dirichlet_by_class(labels, 20, 0.05, least, False, np.random.default_rng(3))) for least in (0, 100)
    )
    assert without.min() == 0
    assert raised.min() == 100
    untouched = (without >= 100) & (without < raised.max())
    assert np.array_equal(without[untouched], raised[untouched])
    assert np.ptp(raised[without > raised.max()]) <= 1, "the largest are cut to one height"


@given(st.integers(1, 20), st.integers(20, 400), st.floats(0.1, 1e3), st.integers(0, 1 << 63))
def test_the_least_may_be_as_much_as_there_is_for_all(n_clients: int, n_samples: int, alpha: float, seed: int) -> None:
    labels, least = np.arange(n_samples) % 3, n_samples // n_clients
    shards = dirichlet_by_class(labels, n_clients, alpha, least, False, np.random.default_rng(seed))
    assert sorted(np.concatenate(shards).tolist()) == list(range(n_samples))
    assert _sizes(shards).min() == least


def test_dirichlet_by_class_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="too few"):
        dirichlet_by_class(np.zeros(9, dtype=np.int64), 5, 1.0, 2, False, np.random.default_rng(0))


@given(st.integers(1, 40), st.integers(1, 7), st.integers(0, 1 << 63))
def test_every_client_has_exactly_its_number_of_classes_in_equal_parts(
    n_clients: int, classes_each: int, seed: int
) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(3, 10), 50))
    shards, again = (classes_partition(labels, n_clients, classes_each, np.random.default_rng(seed)) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(shards, again, strict=True))
    counts = class_counts(labels, shards)
    assert ((counts > 0).sum(1) == classes_each).all()
    for held in counts.T:
        parts = held[held > 0]
        assert len(parts) == 0 or np.ptp(parts) <= 1
        assert held.sum() in (0, 50)
    if n_clients >= 7:
        assert counts.sum() == len(labels), "with as many clients as labels, no label is left over"
    assert len(set(np.concatenate(shards).tolist())) == counts.sum()


@pytest.mark.parametrize(("classes_each", "expected"), [(1, 1.8), (2, 1.6), (10, 0.0)])
def test_one_class_of_ten_lies_an_earth_movers_distance_of_1_8_away(classes_each: int, expected: float) -> None:
    """Zhao et al. 2018: |1 - 0.1| + 9 |0 - 0.1| with one class of ten equal ones; 2 |0.5 - 0.1| + 8 * 0.1 with two."""
    labels = np.repeat(np.arange(10), 5000)
    skew = _label_skew(labels, classes_partition(labels, 10, classes_each, np.random.default_rng(0)))
    tolerance = 0.25 if classes_each == 2 else 1e-9  # of two classes one may have more owners, so smaller parts
    assert skew.earth_mover_mean == pytest.approx(expected, abs=tolerance)
    assert skew.effective_classes_mean == pytest.approx(classes_each, abs=0.3 if classes_each == 2 else 1e-9)


@pytest.mark.parametrize(
    ("classes_each", "what"), [(0, "between 1 and 2"), (3, "between 1 and 2"), (2, "label 7 has 3 samples")]
)
def test_classes_that_cannot_be_dealt_are_refused(classes_each: int, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        classes_partition(np.repeat([4, 7], [20, 3]), 5, classes_each, np.random.default_rng(0))


def _sizes(shards: tuple[Indices, ...]) -> Indices:
    return np.array([len(shard) for shard in shards])


def _label_skew(labels: Labels, shards: tuple[Indices, ...]) -> LabelSkew:
    skew = heterogeneity(Partition(shards), labels).labels
    assert skew is not None
    return skew
