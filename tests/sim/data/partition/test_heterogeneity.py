"""The statistics are their formulas, at the edges as in between."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.sim.data.partition import heterogeneity as module
from umbel.sim.data.partition.heterogeneity import heterogeneity
from umbel.sim.data.partition.partition import Partition, class_counts, shards_of

CLASSES = 4
clients = st.lists(st.lists(st.integers(0, 9), min_size=CLASSES, max_size=CLASSES).filter(any), min_size=1, max_size=12)


def _dealt(counts: list[list[int]]) -> tuple[Partition, np.ndarray]:
    """Clients with so many samples of each class."""
    table = np.array(counts)
    labels = np.concatenate([np.repeat(np.arange(table.shape[1]), row) for row in table])
    return Partition(shards_of(np.repeat(np.arange(len(table)), table.sum(1)), len(table))), labels


@given(clients)
def test_label_skew_is_what_the_formulas_say_client_by_client(counts: list[list[int]]) -> None:
    partition, labels = _dealt(counts)
    found = heterogeneity(partition, labels).labels
    assert found is not None
    whole = np.array(counts).sum(0) / np.sum(counts)
    far, divergence, diverse = [], [], []
    for row in counts:
        p = np.array(row) / sum(row)
        far.append(sum(abs(a - b) for a, b in zip(p, whole, strict=True)))
        middle = (p + whole) / 2
        divergence.append((_relative_entropy(p, middle) + _relative_entropy(whole, middle)) / 2)
        diverse.append(2 ** -sum(a * np.log2(a) for a in p if a))
    assert (found.earth_mover_mean, found.earth_mover_max) == pytest.approx((np.mean(far), max(far)))
    assert (found.total_variation_mean, found.total_variation_max) == pytest.approx((np.mean(far) / 2, max(far) / 2))
    expected = (np.mean(divergence), max(divergence))
    assert (found.jensen_shannon_mean, found.jensen_shannon_max) == pytest.approx(expected, abs=1e-9)
    assert (found.effective_classes_mean, found.effective_classes_min) == pytest.approx(
        (np.mean(diverse), min(diverse))
    )
    assert 0 <= found.jensen_shannon_max <= 1
    assert 0 <= found.total_variation_max <= 1


@given(st.lists(st.integers(0, 50), min_size=1, max_size=15).filter(any))
def test_size_skew_is_what_the_formulas_say(sizes: list[int]) -> None:
    found = heterogeneity(Partition(tuple(np.arange(size) for size in sizes)), None).sizes
    total = sum(sizes)
    assert found.gini == pytest.approx(sum(abs(a - b) for a in sizes for b in sizes) / (2 * len(sizes) * total))
    assert found.variation == pytest.approx(np.std(sizes) / np.mean(sizes))
    assert found.effective_clients == pytest.approx(total**2 / sum(size**2 for size in sizes))
    assert (found.least, found.median, found.greatest) == (min(sizes), np.median(sizes), max(sizes))
    assert 1 - 1e-9 <= found.effective_clients <= len(sizes) + 1e-9


def test_clients_who_share_no_class_are_as_far_apart_as_can_be() -> None:
    found = heterogeneity(*_dealt([[7, 0], [0, 7]])).labels
    assert found is not None
    assert found.total_variation_mean == 0.5, "half of all data are like one's own"
    assert found.effective_classes_mean == 1
    assert found.effective_classes_of_all == pytest.approx(2)
    assert found.jensen_shannon_mean == pytest.approx(0.311278, abs=1e-6)


def test_equal_clients_differ_in_nothing() -> None:
    found = heterogeneity(*_dealt([[3, 2, 1, 5]] * 6))
    assert found.labels is not None
    assert found.labels.total_variation_max == pytest.approx(0)
    assert found.labels.jensen_shannon_max == pytest.approx(0)
    assert found.sizes.gini == found.sizes.variation == 0
    assert found.sizes.effective_clients == pytest.approx(6)


def test_blocks_of_clients_give_what_all_at_once_give(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = np.random.default_rng(0).integers(0, 5, 700)
    partition = Partition(shards_of(np.random.default_rng(1).integers(0, 33, 700), 33))
    at_once = heterogeneity(partition, labels)
    monkeypatch.setattr(module, "_BLOCK", 20)
    assert heterogeneity(partition, labels) == at_once


def test_a_class_that_is_dealt_to_nobody_and_a_client_with_nothing_count_for_nothing() -> None:
    partition = Partition((np.array([0, 1]), np.array([], dtype=np.int64), np.array([2, 3])))
    labels = np.array([0, 1, 0, 1, 8])
    found = heterogeneity(partition, labels)
    assert found.labels is not None
    assert found.labels.total_variation_max == 0
    assert found.n_samples == 4
    assert class_counts(labels, partition.shards).tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 0]]


@pytest.mark.parametrize("targets", [None, np.zeros((4, 3), dtype=np.int64), np.zeros(4)])
def test_targets_that_are_no_classes_are_compared_by_size_alone(targets: np.ndarray | None) -> None:
    found = heterogeneity(Partition((np.arange(3), np.array([3]))), targets)
    assert found.labels is None
    assert len(found.lines()) == 4


def test_it_is_told_in_words_and_in_json() -> None:
    found = heterogeneity(*_dealt([[30, 0], [0, 10]]))
    facts = json.loads(json.dumps(found.facts()))
    assert facts["sizes"]["greatest"] == 30
    assert facts["labels"]["n_classes"] == 2
    lines = found.lines()
    assert lines[0] == "2 clients train on 40 samples"
    assert "samples per client: 10 to 30, median 20" in lines
    assert "weighted by samples, they count as 1.6 equal clients" in lines
    assert "total variation from the whole: mean 0.50, max 0.75" in lines


def test_a_partition_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no client holds a sample"):
        heterogeneity(Partition((np.array([], dtype=np.int64),)), None)


def _relative_entropy(p: np.ndarray, q: np.ndarray) -> float:
    return float(sum(a * np.log2(a / b) for a, b in zip(p, q, strict=True) if a))
