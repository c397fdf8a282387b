"""What a site's own code returns: the result of a training, and of an evaluation. Their constructors check them."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, SupportsFloat, SupportsIndex

from umbel.aggregation.counts import require_counts
from umbel.aggregation.types import require_sample_count


class WeightedMean(float):
    """A metric that is a mean over other things than all samples, such as a sensitivity over the positive ones.

    `weight`: how many things, as a whole number of 0 or more. Means of clients and of batches are averaged by it. With
    0 there was nothing to measure: the value does not count, but under masks the client counts as one that has the
    metric. Raises `TypeError` and `ValueError` for another weight.
    """

    __slots__ = ("weight",)
    weight: int

    def __new__(cls, value: SupportsFloat, weight: SupportsIndex) -> "WeightedMean":
        made = super().__new__(cls, _number(value, "the value"))
        made.weight = _whole(weight, "weight")
        require_sample_count(made.weight, "weight", least=0)
        return made

    def __repr__(self) -> str:
        return f"WeightedMean({float(self)!r}, {self.weight})"


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of training. Fewer steps than planned are partial work, which counts.

    `counts` have whole numbers by name that add up over clients, as those of `client/training/counts.py`: a number, a
    sequence, or an array or tensor, whose values are taken row by row.

    Raises `TypeError` for a count that is no whole number, or a metric that is no number; numpy's and torch's numbers
    are accepted. Raises `ValueError` for counts that no report may have (`aggregation/counts.py`). Three fields are for
    canaries: `steps_full`, `first_loss` and `last_loss`. If `steps_full` or `last_loss` is None, the loop estimates it.
    """

    sample_count: int  # the samples trained on, by which the update is weighted
    steps_done: int
    steps_planned: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # means over the training, as floats
    counts: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the training; kept as tuples
    _: KW_ONLY
    steps_full: int | None = None  # of a whole round's work, where only a share was asked
    first_loss: float | None = None  # of the first step
    last_loss: float | None = None  # of the last step
    weights: Mapping[str, int] = field(default_factory=dict[str, int])  # of metrics given as `WeightedMean`
    samples_seen: int = 0  # in all steps, by which the means of a silo's ranks are weighted; 0: nobody has counted

    def __post_init__(self) -> None:
        for name in ("sample_count", "steps_done", "steps_planned"):
            object.__setattr__(self, name, _whole(getattr(self, name), name))
        _set_metrics(self, self.metrics, self.weights)
        object.__setattr__(self, "counts", _counts(self.counts))
        if self.steps_full is not None:
            object.__setattr__(self, "steps_full", _whole(self.steps_full, "steps_full"))
        for name in ("first_loss", "last_loss"):
            if (loss := getattr(self, name)) is not None:
                object.__setattr__(self, name, _number(loss, name))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model's metrics: means over `sample_count` held-out samples, and counts of them.

    Takes and refuses what `TrainResult` does.
    """

    sample_count: int
    metrics: Mapping[str, float]
    counts: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of held-out samples; kept as tuples
    weights: Mapping[str, int] = field(default_factory=dict[str, int])  # of metrics given as `WeightedMean`

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_count", _whole(self.sample_count, "sample_count"))
        _set_metrics(self, self.metrics, self.weights)
        object.__setattr__(self, "counts", _counts(self.counts))


def _set_metrics(result: TrainResult | Evaluation, metrics: Any, weights: Mapping[str, int]) -> None:
    """Set metrics as floats, and the weights of those that have one of their own. A metric with the weight 0 has no
    value, so only its weight is kept.
    """
    found = _numbers(metrics)
    own = {str(name): value.weight for name, value in metrics.items() if isinstance(value, WeightedMean)}
    own = {**{name: weight for name, weight in weights.items() if name in found or not weight}, **own}
    object.__setattr__(result, "metrics", {name: value for name, value in found.items() if own.get(name, 1)})
    object.__setattr__(result, "weights", own)


def _whole(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be a whole number, not {type(value).__name__}") from error


def _number(value: Any, name: str) -> float:
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    return float(value)


def _numbers(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a mapping from names to numbers, not {type(metrics).__name__}")
    named: Mapping[object, object] = metrics
    return {str(name): _number(value, f"metric {str(name)!r:.80}") for name, value in named.items()}


def _counts(counts: Any) -> dict[str, tuple[int, ...]]:
    if not isinstance(counts, Mapping):
        raise TypeError(f"counts must be a mapping from names to whole numbers, not {type(counts).__name__}")
    named: Mapping[object, object] = counts
    found = {str(name): tuple(_flat(numbers, f"counts {str(name)!r:.80}")) for name, numbers in named.items()}
    require_counts(found)
    return found


def _flat(numbers: Any, name: str) -> Iterator[int]:
    """The whole numbers in a number, an array, a tensor or nested sequences, row by row."""
    plain = numbers.tolist() if hasattr(numbers, "tolist") else numbers
    if isinstance(plain, Sequence) and not isinstance(plain, str | bytes):
        items: Sequence[object] = plain
        for item in items:
            yield from _flat(item, name)
    else:
        yield _whole(plain, f"each number of {name}")
