"""Counts for `TrainResult.counts` and `Evaluation.counts`: confusion matrices and histograms of scores.

Each function takes one batch and returns an int64 tensor on the batch's device. Sums over batches are counts of all the
samples:

```
counts = {"confusion": torch.zeros(4, dtype=torch.int64), "scores": torch.zeros(2 * 32, dtype=torch.int64)}
for inputs, target in loader:
    logits = model(inputs)
    counts["confusion"] += confusion_counts(logits, target)
    counts["scores"] += score_histogram(logits.sigmoid(), target, 32)
return Evaluation(n_samples, {"loss": loss}, counts)
```

The coordinator derives sensitivity, AUC and others from their sums (`aggregation/run/derived_metrics.py`).
"""

import torch
from torch import Tensor

from umbel.client.training.losses import IGNORED


def confusion_counts(scores: Tensor, target: Tensor, threshold: float = 0.0) -> Tensor:
    """(true positives, false positives, false negatives, true negatives) of two classes: int64, shape (4,).

    `scores`: floating point, of any shape. Above `threshold` they mean class 1: 0 suits logits, 0.5 probabilities; a
    NaN means class 0. `target`: as many values, each 0 or 1, in the same order. Raises `ValueError` for others.
    """
    is_positive, said = _positive(scores, target), scores.detach().reshape(-1) > threshold
    return torch.stack(
        [
            (said & is_positive).sum(),
            (said & ~is_positive).sum(),
            (~said & is_positive).sum(),
            (~said & ~is_positive).sum(),
        ]
    )


def class_confusion_counts(logits: Tensor, target: Tensor, n_classes: int) -> Tensor:
    """The confusion matrix of `n_classes` classes, row by row: int64, shape (n_classes^2,).

    Row i, column j: samples of class i whose greatest logit is that of class j. Two classes are counted as by
    `confusion_counts`, and class 1 is the positive one.

    `logits`: (samples, n_classes, ...), as `torch.nn.functional.cross_entropy` takes them. `target`: integers of the
    same shape without the dimension of classes; -100 is not counted. Raises `ValueError` for others.
    """
    if logits.dim() < 2 or logits.shape[1] != n_classes or logits[:, 0].shape != target.shape:
        raise ValueError(
            f"logits must have shape (samples, {n_classes}, ...) and target the same without the second dimension, "
            f"but they have {tuple(logits.shape)} and {tuple(target.shape)}"
        )
    if target.is_floating_point() or target.is_complex():
        raise ValueError(f"target must have an integer type, not {target.dtype}: it holds numbers of classes")
    counted = target != IGNORED
    truth, said = target[counted].to(torch.int64), logits.detach().argmax(1)[counted]
    if truth.numel() and not (truth.min() >= 0 and truth.max() < n_classes):
        raise ValueError(f"target must hold classes from 0 to {n_classes - 1}, or {IGNORED} for what is not counted")
    matrix = torch.bincount(truth * n_classes + said, minlength=n_classes**2)
    return matrix[[3, 1, 2, 0]] if n_classes == 2 else matrix


def score_histogram(probabilities: Tensor, target: Tensor, bins: int) -> Tensor:
    """Histograms of the scores of class 0 and then of class 1: int64, shape (2 * bins,).

    Bin i of `bins` holds scores from i / bins up to (i + 1) / bins, the last one also 1. More bins make the AUC that
    follows more exact. `probabilities`: floating point, of any shape, from 0 to 1. `target`: as many values, each 0 or
    1, in the same order. Raises `ValueError` for others, such as logits or a NaN.
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, not {bins}")
    is_positive = _positive(probabilities, target)
    scores = probabilities.detach().reshape(-1).to(torch.promote_types(probabilities.dtype, torch.float32))
    if not bool(((scores >= 0) & (scores <= 1)).all()):  # also refuses a NaN
        raise ValueError(
            "every score must be a number from 0 to 1: pass probabilities, such as logits.sigmoid() or "
            "logits.softmax(1)[:, 1]"
        )
    bin_of = (scores * bins).to(torch.int64).clamp_(max=bins - 1)
    return torch.bincount(bin_of + bins * is_positive, minlength=2 * bins)


def _positive(scores: Tensor, target: Tensor) -> Tensor:
    """Whether each sample is of class 1: bool, flat. Raises `ValueError`."""
    if not scores.is_floating_point():
        raise ValueError(f"scores must have a floating-point type, not {scores.dtype}")
    if scores.numel() != target.numel():
        raise ValueError(
            f"each score needs one target, but their shapes are {tuple(scores.shape)} and {tuple(target.shape)}"
        )
    flat = target.detach().reshape(-1)
    is_positive = flat == 1
    if not bool((is_positive | (flat == 0)).all()):
        raise ValueError("every target must be 0 or 1")
    return is_positive
