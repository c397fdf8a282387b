"""What a site's own code returns: the result of a training, and of an evaluation. Their constructors check them."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsFloat


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of training. Fewer steps than planned are partial work, which counts.

    Raises `TypeError` for a count that is no whole number, or a metric that is no number; numpy's and torch's numbers
    are accepted. The last three fields are for canaries; without them the loop estimates.
    """

    sample_count: int  # the samples trained on, which weigh the update
    steps_done: int
    steps_planned: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # means over the training
    steps_full: int | None = None  # of a whole round's work, where only a share was asked
    first_loss: float | None = None  # of the first step
    last_loss: float | None = None  # of the last step

    def __post_init__(self) -> None:
        for name in ("sample_count", "steps_done", "steps_planned"):
            object.__setattr__(self, name, _whole(getattr(self, name), name))
        object.__setattr__(self, "metrics", _numbers(self.metrics))
        if self.steps_full is not None:
            object.__setattr__(self, "steps_full", _whole(self.steps_full, "steps_full"))
        for name in ("first_loss", "last_loss"):
            if (loss := getattr(self, name)) is not None:
                object.__setattr__(self, name, _number(loss, name))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model's metrics: means over `sample_count` held-out samples. Raises `TypeError` as `TrainResult` does."""

    sample_count: int
    metrics: Mapping[str, float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_count", _whole(self.sample_count, "sample_count"))
        object.__setattr__(self, "metrics", _numbers(self.metrics))


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
