"""Figures that follow from counts: sensitivity, specificity, precision, F1, accuracy and AUC. Pure, of exact integers.

The last part of a name says what its numbers are; a prefix keeps several apart, as in `lesion.confusion`:

- `confusion`, four numbers: true positives, false positives, false negatives, true negatives of two classes.
- `confusion`, n^2 numbers for n >= 3 classes: the matrix row by row. Row i, column j: samples of class i that the model
  took for class j.
- `scores`, 2 b numbers: histograms of scores in b equal bins over [0, 1], first of the negative samples, then of the
  positive ones.

Counts of other names are added up, and nothing is derived from them.

Definitions of two classes: Fawcett, "An introduction to ROC analysis" (2006), section 3 and figure 1. Of n classes, a
figure is the mean over classes of each class against all others (macro mean), without classes for which it is not
defined: a sensitivity needs samples of the class. A figure that is not defined is left out, not zero.

**AUC** is the probability that a positive sample scores higher than a negative one, where equal scores count half
(Hanley and McNeil 1982, "The meaning and use of the area under a receiver operating characteristic curve", p. 31: it is
the Mann-Whitney statistic). A histogram knows the order of two scores unless they share a bin. Such a pair counts half,
and its true share is between 0 and 1. With n_i negative and p_i positive scores in bin i, N and P in all:

    AUC = (sum over i of p_i (n_0 + ... + n_(i-1) + n_i / 2)) / (P N)
    |AUC - AUC of the scores themselves| <= (sum over i of p_i n_i) / (2 P N)      (`auc_error_max`)
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from umbel.aggregation.counts import CountsByName

_RATES = ("sensitivity", "specificity", "precision", "f1")
_OF_CONFUSION = (*_RATES, "accuracy", "balanced_accuracy")
_OF_SCORES = ("auc", "auc_error_max")
Figure = tuple[str, float]


def derived_metrics(counts: CountsByName) -> dict[str, float]:
    """All figures that are defined, by names such as `confusion.sensitivity` and `scores.auc`; each is in [0, 1]."""
    return {
        f"{name}.{figure}": value
        for name, numbers in sorted(counts.items())
        if (figures := _FIGURES.get(_kind(name))) is not None
        for figure, value in figures(numbers)
    }


def with_derived(means: Mapping[str, float], counts: CountsByName) -> dict[str, float]:
    """Metrics that are means, and the figures that follow from counts. A mean with the name of a figure is left out."""
    return {**means, **derived_metrics(counts)}


def derived_names(lengths: Mapping[str, int]) -> frozenset[str]:
    """The names that `derived_metrics` can give for counts of these names, each with how many numbers it has."""
    found = set[str]()
    for name, length in lengths.items():
        if _kind(name) == "confusion" and _n_classes(length):
            found |= {f"{name}.{figure}" for figure in _OF_CONFUSION}
        if _kind(name) == "scores" and length % 2 == 0:
            found |= {f"{name}.{figure}" for figure in _OF_SCORES}
    return frozenset(found)


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _n_classes(length: int) -> int:
    """The classes of a confusion matrix with this many numbers, at least 2; 0 if it is none."""
    n = math.isqrt(length)
    return n if n >= 2 and n * n == length else 0


def _of_confusion(numbers: Sequence[int]) -> Iterator[Figure]:
    n, total = _n_classes(len(numbers)), sum(numbers)
    if not n or not total:
        return
    if n == 2:
        true_positive, false_positive, false_negative, true_negative = numbers
        found = _rates(true_positive, false_positive, false_negative, true_negative)
        yield from found.items()
        yield "accuracy", (true_positive + true_negative) / total
        if "sensitivity" in found and "specificity" in found:
            yield "balanced_accuracy", (found["sensitivity"] + found["specificity"]) / 2
        return
    found = _macro_means(numbers, n)
    yield from found.items()
    yield "accuracy", sum(numbers[:: n + 1]) / total
    yield "balanced_accuracy", found["sensitivity"]


def _macro_means(numbers: Sequence[int], n: int) -> dict[str, float]:
    """The means of `_rates` over classes. With samples, the sensitivity is defined for at least one class."""
    total, of_classes = sum(numbers), list[dict[str, float]]()
    for one in range(n):
        hit, row, column = numbers[one * (n + 1)], sum(numbers[one * n : (one + 1) * n]), sum(numbers[one::n])
        of_classes.append(_rates(hit, column - hit, row - hit, total - row - column + hit))
    defined = {name: [rates[name] for rates in of_classes if name in rates] for name in _RATES}
    return {name: math.fsum(values) / len(values) for name, values in defined.items() if values}


def _rates(true_positive: int, false_positive: int, false_negative: int, true_negative: int) -> dict[str, float]:
    """Of one class against the others; only those whose denominator is not zero."""
    fractions = {
        "sensitivity": (true_positive, true_positive + false_negative),
        "specificity": (true_negative, true_negative + false_positive),
        "precision": (true_positive, true_positive + false_positive),
        "f1": (2 * true_positive, 2 * true_positive + false_positive + false_negative),
    }
    return {name: part / whole for name, (part, whole) in fractions.items() if whole}


def _of_scores(numbers: Sequence[int]) -> Iterator[Figure]:
    bins, is_odd = divmod(len(numbers), 2)
    negatives, positives = numbers[:bins], numbers[bins:]
    n_pairs = sum(negatives) * sum(positives)
    if is_odd or not n_pairs:
        return
    below, twice_won, tied = 0, 0, 0
    for negative, positive in zip(negatives, positives, strict=True):
        twice_won += positive * (2 * below + negative)
        tied += positive * negative
        below += negative
    yield "auc", twice_won / (2 * n_pairs)
    yield "auc_error_max", tied / (2 * n_pairs)


_FIGURES: Mapping[str, Callable[[Sequence[int]], Iterator[Figure]]] = {
    "confusion": _of_confusion,
    "scores": _of_scores,
}
