"""What a site writes: a `Client` that trains. What it is asked (`LocalPlan`), and what it answers.

Nothing here knows of HTTP, rounds or files; `loop.py` calls a `Client` and does the rest.
"""

import math
import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

from torch import Tensor, nn

SHARE_STEPS_MIN = 3  # the first one loads libraries and data, and says little of how long the others take


def _never() -> str | None:
    return None


class Checkpoint:
    """Where a training in progress is kept, so that a client that is killed goes on from there: `load` at the start,
    and `save` between two steps whenever `is_due`. This one keeps nothing; the loop hands out one that does.

    ```
    kept = plan.checkpoint.load() or {"step": 0}
    if kept["step"]:
        model.load_state_dict(kept["model"]), optimizer.load_state_dict(kept["optimizer"])
    for step in range(kept["step"], planned):
        ...
        if plan.checkpoint.is_due():
            plan.checkpoint.save(
                {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            )
    ```
    """

    def is_due(self) -> bool:
        """Whether it is time to save again: so seldom that saving takes at most a fortieth of the training's time."""
        return False

    def save(self, state: Mapping[str, object]) -> None:
        """Replace what was saved. `state`: dicts, lists, tuples, tensors, numbers and texts in any nesting.

        Never raises: a disk that is full costs a line in the log.
        """

    def load(self) -> dict[str, Any] | None:
        """What an earlier process saved of this very assignment, tensors on the CPU; None if training starts anew."""
        return None


def _nothing() -> Mapping[str, Callable[[Tensor], Tensor]]:
    return {}


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What a site is asked to do with the model in this round.

    Either `epochs` or `steps` is set. `proximal_mu`: FedProx's mu, zero for plain averaging. `seed`: for batch order,
    dropout and the like; the same round and client give the same seed, but in a secure round. `evaluate`: the model
    was, or will be, measured on the site's held-out data first. `deadline`: on `clock`, when training must end so that
    there is time to send. `checkpoint`: where to keep a training that takes long; the ready trainer does so by itself.
    `share`: how much of the work to do, below 1 in a canary; `steps_for` minds it. `within`: by name of a parameter,
    what takes its gradient to the part of it that can be sent, where the run's codec sends only a part of the model (a
    structured mask, or low rank); the ready trainer minds it, and of what leaves that part nothing arrives.
    """

    epochs: int | None = None
    steps: int | None = None
    batch_size: int = 32
    learning_rate: float = 0.01
    proximal_mu: float = 0.0
    seed: int = 0
    evaluate: bool = False
    share: float = 1.0
    within: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=_nothing, repr=False)
    deadline: float = float("inf")
    checkpoint: Checkpoint = field(default_factory=Checkpoint, repr=False)
    told_to_stop: Callable[[], str | None] = field(default=_never, repr=False)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    def steps_for(self, n_batches: int) -> int:
        """Steps asked of a site whose data make `n_batches` batches an epoch; if a share, `SHARE_STEPS_MIN` or more."""
        full = self.full_steps_for(n_batches)
        return min(full, max(SHARE_STEPS_MIN, math.ceil(round(self.share * full, 9))))

    def full_steps_for(self, n_batches: int) -> int:
        """The same if all of the work were asked."""
        return self.steps if self.steps is not None else (self.epochs or 1) * n_batches

    @property
    def seconds_left(self) -> float:
        return self.deadline - self.clock()

    def should_stop(self) -> str | None:
        """Why training should end now, in words, or None. Cheap: ask before every step but the first."""
        if reason := self.told_to_stop():
            return reason
        return "the deadline is near" if self.seconds_left <= 0 else None


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What came of training: fewer steps than planned is partial work, and welcome. Raises `TypeError` for a count that
    is no whole number, and for a metric that is none; numbers of numpy and torch are taken.

    `sample_count`: samples the site trained on, which weighs its update. `metrics`: means over the training, such as
    `{"loss": 0.3}`. For a canary, where only a share is asked: `steps_full`, of a whole round's work; `first_loss` and
    `last_loss`, of the first and the last step. Where they are left out, the loop makes do with what it knows.
    """

    sample_count: int
    steps_done: int
    steps_planned: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    steps_full: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None

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
    """How a model did on `sample_count` held-out samples of this site; `metrics` are means over them. Raises
    `TypeError` as `TrainResult` does.
    """

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


class Client(ABC):
    """A site's own code. Set `model` and `sample_count`, and write `train`.

    `model`: the network, with the tensors the run's model has; its weights are overwritten each round. `sample_count`:
    how many samples the site trains on, at least 1.
    """

    model: nn.Module
    sample_count: int

    @abstractmethod
    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        """Train `model`, which holds the global weights, in place, for at least one step."""

    def evaluate(self, model: nn.Module) -> Evaluation | None:
        """Measure `model`, which holds the global weights, on held-out data; None if there are none."""
        return None
