"""What a site is asked to do with the model in one round, and what it keeps of a training in progress."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Projection = Callable[[Tensor], Tensor]
SHARE_STEPS_MIN = 3  # the first step also loads libraries and data, so it says little about the others


def _never() -> str | None:
    return None


class Checkpoint:
    """Keeps a training in progress, so that a killed client resumes it: `load` at the start, and `save` between two
    steps whenever `is_due`. This one keeps nothing; the loop passes one that does.

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
        """Whether it is time to save again. Saving takes at most a fortieth of the training's time."""
        return False

    def save(self, state: Mapping[str, object]) -> None:
        """Replace what was saved, or log why not. `state`: dicts, lists, tuples, tensors, numbers and texts, nested."""

    def load(self) -> dict[str, Any] | None:
        """What an earlier process saved for this assignment, tensors on the CPU; None if there is nothing."""
        return None


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What a site is asked to do with the model in this round."""

    epochs: int | None = None  # either epochs or steps is set
    steps: int | None = None
    batch_size: int = 32
    learning_rate: float = 0.01
    proximal_mu: float = 0.0  # FedProx's mu; 0 for plain averaging
    seed: int = 0
    """For batch order, dropout and the like. Outside secure rounds the same round and client give the same seed."""
    evaluate: bool = False  # whether the model is measured on held-out data before training
    share: float = 1.0  # the share of the work to do, below 1 in a canary; `steps_for` applies it
    within: Mapping[str, Projection] = field(default_factory=dict[str, Projection], repr=False)
    """By parameter name: projects the gradient onto what the codec can send, if it sends only a part of the model (a
    structured mask, or low rank). The ready trainer applies it; changes outside that part are not sent."""
    deadline: float = float("inf")  # on `clock`: when training must end so that there is time to send
    checkpoint: Checkpoint = field(default_factory=Checkpoint, repr=False)  # the ready trainer uses it by itself
    told_to_stop: Callable[[], str | None] = field(default=_never, repr=False)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    def steps_for(self, n_batches: int) -> int:
        """The steps to do if an epoch has `n_batches` batches. A share is at least `SHARE_STEPS_MIN` steps."""
        full = self.full_steps_for(n_batches)
        return min(full, max(SHARE_STEPS_MIN, math.ceil(round(self.share * full, 9))))

    def full_steps_for(self, n_batches: int) -> int:
        """The steps of a whole round's work."""
        return self.steps if self.steps is not None else (self.epochs or 1) * n_batches

    @property
    def seconds_left(self) -> float:
        return self.deadline - self.clock()

    def should_stop(self) -> str | None:
        """Why training should end now, in words, or None. Call it before every step but the first; it is cheap."""
        if reason := self.told_to_stop():
            return reason
        return "the deadline is near" if self.seconds_left <= 0 else None
