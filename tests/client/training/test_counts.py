"""A site's counts of one batch: the same as a slow count of its samples, and sums over batches count all of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix
from torch import Tensor

from umbel.client.training.counts import class_confusion_counts, confusion_counts, score_histogram
from umbel.client.training.losses import IGNORED

BINARY = st.lists(st.tuples(st.floats(-4, 4, width=32), st.integers(0, 1)), min_size=1, max_size=40)
SCORED = st.lists(st.tuples(st.floats(0, 1, width=32), st.integers(0, 1)), min_size=1, max_size=40)
DTYPES = st.sampled_from([torch.int64, torch.int32, torch.float32, torch.bool, torch.uint8])


def columns(samples: list[tuple[float, int]], dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    scores, targets = zip(*samples, strict=True)
    return torch.tensor(scores, dtype=torch.float32), torch.tensor(targets).to(dtype)


@given(samples=BINARY, threshold=st.floats(-2, 2, width=32), dtype=DTYPES, cut=st.integers(0, 40))
def test_confusion_counts_of_batches_add_up_to_a_count_of_all_samples(
    samples: list[tuple[float, int]], threshold: float, dtype: torch.dtype, cut: int
) -> None:
    scores, target = columns(samples, dtype)
    parts = (slice(0, cut), slice(cut, None))
    found = sum((confusion_counts(scores[part], target[part], threshold) for part in parts), torch.zeros(4).long())
    slow = [0, 0, 0, 0]
    for score, truth in samples:
        slow[{(True, 1): 0, (True, 0): 1, (False, 1): 2, (False, 0): 3}[score > threshold, truth]] += 1
    assert found.tolist() == slow
    assert found.dtype is torch.int64


def test_one_column_of_logits_and_a_flat_target_are_not_broadcast() -> None:
    scores, target = torch.tensor([[2.0], [-1.0], [3.0]]), torch.tensor([1, 1, 0])
    assert confusion_counts(scores, target).tolist() == [1, 1, 1, 0]


def test_a_score_that_is_no_number_means_class_0() -> None:
    assert confusion_counts(torch.tensor([float("nan")] * 2), torch.tensor([0, 1])).tolist() == [0, 0, 1, 1]


@given(data=st.data(), n_classes=st.integers(3, 6), n=st.integers(1, 30))
def test_the_matrix_of_classes_is_scikit_learns(data: st.DataObject, n_classes: int, n: int) -> None:
    target = torch.tensor(data.draw(st.lists(st.integers(0, n_classes - 1), min_size=n, max_size=n)))
    logits = torch.randn(n, n_classes, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    expected = confusion_matrix(target.numpy(), logits.argmax(1).numpy(), labels=range(n_classes))
    found = class_confusion_counts(logits, target, n_classes)
    assert found.view(n_classes, n_classes).tolist() == expected.tolist()
    cut = data.draw(st.integers(0, n))
    parts = (slice(0, cut), slice(cut, None))
    of_parts = [class_confusion_counts(logits[part], target[part], n_classes) for part in parts]
    assert (of_parts[0] + of_parts[1]).tolist() == found.tolist()


@given(samples=BINARY)
def test_two_classes_are_counted_as_one_logit_is(samples: list[tuple[float, int]]) -> None:
    scores, target = columns(samples)
    logits = torch.stack([torch.zeros_like(scores), scores], 1)
    assert class_confusion_counts(logits, target, 2).tolist() == confusion_counts(scores, target).tolist()


def test_each_pixel_of_a_segmentation_counts_except_the_ignored_ones() -> None:
    logits = torch.zeros(2, 3, 4, 5)
    logits[:, 1] = 1.0
    target = torch.full((2, 4, 5), 1)
    target[0, 0, :3], target[1, 0, 0] = IGNORED, 2
    assert class_confusion_counts(logits, target, 3).tolist() == [0, 0, 0, 0, 36, 0, 0, 1, 0]


@given(samples=SCORED, bins=st.integers(1, 12), cut=st.integers(0, 40))
def test_histograms_of_batches_add_up_and_put_each_score_into_its_bin(
    samples: list[tuple[float, int]], bins: int, cut: int
) -> None:
    scores, target = columns(samples)
    found = score_histogram(scores[:cut], target[:cut], bins) + score_histogram(scores[cut:], target[cut:], bins)
    assert int(found.sum()) == len(samples)
    assert int(found[bins:].sum()) == sum(truth for _, truth in samples)
    slow = [0] * (2 * bins)
    for score, truth in zip(scores, target.tolist(), strict=True):
        slow[truth * bins + min(int(score * bins), bins - 1)] += 1
    assert found.tolist() == slow


@pytest.mark.parametrize(
    ("scores", "target", "why"),
    [
        (torch.tensor([0.5]), torch.tensor([2]), "every target must be 0 or 1"),
        (torch.tensor([0.5]), torch.tensor([0.5]), "every target must be 0 or 1"),
        (torch.tensor([0.5, 0.5]), torch.tensor([1]), r"their shapes are \(2,\) and \(1,\)"),
        (torch.tensor([1]), torch.tensor([1]), "floating-point type"),
    ],
)
def test_scores_without_a_class_0_or_1_each_are_refused(scores: Tensor, target: Tensor, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        confusion_counts(scores, target)
    with pytest.raises(ValueError, match=why):
        score_histogram(scores, target, 4)


@pytest.mark.parametrize("score", [-0.1, 1.5, float("nan"), float("inf")])
def test_a_histogram_refuses_logits(score: float) -> None:
    with pytest.raises(ValueError, match="pass probabilities"):
        score_histogram(torch.tensor([score]), torch.tensor([1]), 4)


def test_a_histogram_needs_a_bin() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        score_histogram(torch.tensor([0.5]), torch.tensor([1]), 0)


@pytest.mark.parametrize(
    ("logits", "target", "why"),
    [
        (torch.zeros(2, 3), torch.tensor([0, 3]), "classes from 0 to 2"),
        (torch.zeros(2, 3), torch.tensor([0, -1]), "classes from 0 to 2"),
        (torch.zeros(2, 4), torch.tensor([0, 1]), r"\(samples, 3, ...\)"),
        (torch.zeros(2, 3), torch.tensor([0]), r"\(samples, 3, ...\)"),
        (torch.zeros(6), torch.tensor([0]), r"\(samples, 3, ...\)"),
        (torch.zeros(2, 3), torch.tensor([0.0, 1.0]), "integer type"),
    ],
)
def test_a_matrix_of_classes_refuses_what_it_cannot_count(logits: Tensor, target: Tensor, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        class_confusion_counts(logits, target, 3)
