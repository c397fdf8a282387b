"""Figures from counts: scikit-learn is the oracle, over the pooled samples of any number of clients and batches."""

import math
import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as oracle

from umbel.aggregation.counts import CountsByName, sum_of_counts
from umbel.aggregation.run.derived_metrics import derived_metrics, derived_names
from umbel.client.training.counts import class_confusion_counts, confusion_counts, score_histogram

CLOSE = pytest.approx
UNDEFINED: Any = np.nan  # scikit-learn's own annotations know only texts here


def samples_of(seed: int, n: int, n_classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that know something of the targets; rare classes may be absent."""
    drawn = torch.Generator().manual_seed(seed)
    target = torch.randint(0, n_classes, (n,), generator=drawn)
    logits = torch.randn(n, n_classes, generator=drawn) + torch.nn.functional.one_hot(target, n_classes)
    return logits, target


def split(n: int, cuts: list[int]) -> list[slice]:
    """Consecutive parts, some of them empty."""
    edges = [0, *sorted(min(cut, n) for cut in cuts), n]
    return [slice(first, last) for first, last in pairwise(edges)]


def numbers(counts: torch.Tensor) -> tuple[int, ...]:
    return tuple(counts.tolist())


def scikit_learns(target: Any, said: Any, n_classes: int) -> dict[str, float]:
    """Its values, without those that are not defined there."""
    kwargs: dict[str, Any] = {"labels": range(n_classes), "average": "macro", "zero_division": UNDEFINED}
    if n_classes == 2:
        kwargs = {"pos_label": 1, "zero_division": UNDEFINED}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes without samples
        found = {
            "sensitivity": oracle.recall_score(target, said, **kwargs),
            "precision": oracle.precision_score(target, said, **kwargs),
            "f1": oracle.f1_score(target, said, **kwargs),
            "accuracy": oracle.accuracy_score(target, said),
            "balanced_accuracy": oracle.balanced_accuracy_score(target, said),
        }
        if n_classes == 2:
            found["specificity"] = oracle.recall_score(target, said, pos_label=0, zero_division=UNDEFINED)
            if len(set(target.tolist())) < 2:
                del found["balanced_accuracy"]  # scikit-learn takes the mean of one class
        else:
            of_each = [
                oracle.recall_score(target == one, said == one, pos_label=False, zero_division=UNDEFINED)
                for one in range(n_classes)
            ]
            found["specificity"] = float(np.nanmean(of_each))
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


@given(seed=st.integers(0, 10_000), n=st.integers(1, 40), cuts=st.lists(st.integers(0, 40), max_size=5))
def test_figures_of_two_classes_are_scikit_learns_of_the_pooled_samples(seed: int, n: int, cuts: list[int]) -> None:
    logits, target = samples_of(seed, n, 2)
    scores = logits[:, 1] - logits[:, 0]
    of_clients = [{"confusion": numbers(confusion_counts(scores[part], target[part]))} for part in split(n, cuts)]
    expected = scikit_learns(target.numpy(), (scores > 0).long().numpy(), 2)
    found = derived_metrics(sum_of_counts(of_clients))
    assert found == CLOSE({f"confusion.{name}": value for name, value in expected.items()})


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 40),
    n_classes=st.integers(3, 6),
    cuts=st.lists(st.integers(0, 40), max_size=5),
)
def test_figures_of_more_classes_are_scikit_learns_macro_means(
    seed: int, n: int, n_classes: int, cuts: list[int]
) -> None:
    logits, target = samples_of(seed, n, n_classes)
    of_clients = [
        {"organ.confusion": numbers(class_confusion_counts(logits[part], target[part], n_classes))}
        for part in split(n, cuts)
    ]
    expected = scikit_learns(target.numpy(), logits.argmax(1).numpy(), n_classes)
    found = derived_metrics(sum_of_counts(of_clients))
    assert found == CLOSE({f"organ.confusion.{name}": value for name, value in expected.items()})


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(2, 60),
    bins=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 60), max_size=5),
)
def test_the_auc_of_histograms_is_within_its_bound_of_scikit_learns(
    seed: int, n: int, bins: int, cuts: list[int]
) -> None:
    logits, target = samples_of(seed, n, 2)
    scores = (logits[:, 1] - logits[:, 0]).sigmoid()
    of_clients = [{"scores": numbers(score_histogram(scores[part], target[part], bins))} for part in split(n, cuts)]
    found = derived_metrics(sum_of_counts(of_clients))
    if len(set(target.tolist())) < 2:
        assert found == {}
        return
    binned = (scores * bins).long().clamp(max=bins - 1)
    assert found["scores.auc"] == CLOSE(oracle.roc_auc_score(target, binned))
    off = abs(found["scores.auc"] - oracle.roc_auc_score(target, scores))
    assert off <= found["scores.auc_error_max"] + 1e-12


def test_the_auc_of_a_published_example() -> None:
    """Hanley and McNeil (1982), table I: ratings of 109 CT images, 58 normal and 51 abnormal, have the area 0.893."""
    normal, abnormal = (33, 6, 6, 11, 2), (3, 2, 2, 11, 33)
    found = derived_metrics({"ct.scores": normal + abnormal})
    assert round(found["ct.scores.auc"], 3) == 0.893


def test_a_confusion_matrix_by_hand() -> None:
    assert derived_metrics({"confusion": (30, 10, 20, 40)}) == CLOSE(
        {
            "confusion.sensitivity": 0.6,
            "confusion.specificity": 0.8,
            "confusion.precision": 0.75,
            "confusion.f1": 60 / 90,
            "confusion.accuracy": 0.7,
            "confusion.balanced_accuracy": 0.7,
        }
    )


@pytest.mark.parametrize(
    ("counts", "figures"),
    [
        ({"confusion": (0, 0, 0, 0)}, set()),
        ({"confusion": (0, 0, 0, 9)}, {"specificity", "accuracy"}),
        ({"confusion": (0, 0, 5, 9)}, {"sensitivity", "specificity", "f1", "accuracy", "balanced_accuracy"}),
        ({"confusion": (1, 2, 3)}, set()),
        ({"confusion": (7,)}, set()),
        ({"scores": (1, 2, 0, 0)}, set()),
        ({"scores": (1, 2, 3)}, set()),
        ({"scores": (1, 0, 0, 1)}, {"auc", "auc_error_max"}),
        ({"deaths": (1, 2, 3, 4)}, set()),
        ({"confusions": (1, 2, 3, 4)}, set()),
        ({}, set()),
    ],
)
def test_what_is_not_defined_is_left_out(counts: CountsByName, figures: set[str]) -> None:
    assert derived_metrics(counts).keys() == {f"{name}.{figure}" for name in counts for figure in figures}


@given(
    name=st.sampled_from(["confusion", "scores", "a.confusion", "b/c.scores", "other", "confusion.x"]),
    of=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=30).map(tuple),
)
def test_every_figure_is_a_share_and_its_name_is_known_before(name: str, of: tuple[int, ...]) -> None:
    found = derived_metrics({name: of})
    assert all(0 <= value <= 1 for value in found.values())
    assert found.keys() <= derived_names({name: len(of)})


def test_names_are_known_before_exactly_where_counts_can_give_them() -> None:
    lengths = {"confusion": 4, "organ.confusion": 9, "scores": 8, "odd.scores": 7, "no.confusion": 5, "other": 4}
    full = {name: tuple(range(1, 1 + length)) for name, length in lengths.items()}
    assert derived_names(lengths) == derived_metrics(full).keys()
