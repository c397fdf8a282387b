"""The learning rate over the rounds of a run: the table [training.schedule] of a run file, and what follows from it.

    rate = learning_rate * (clients / per_clients) * warm-up * factor

- linear scaling with the cohort, and a warm-up that rises in equal parts: Goyal et al. 2017, "Accurate, Large Minibatch
  SGD: Training ImageNet in 1 Hour", sections 2.1 and 2.2;
- "step": times `factor` after every `every` rounds;
- "cosine": final + (1 - final) (1 + cos(pi t / T)) / 2 in round t (from 0) of T, after the warm-up: Loshchilov and
  Hutter 2017, "SGDR", eq. 5, without restarts.

A rate is rounded to nine digits, so that a site can compute it again: the last bits of a cosine differ between
machines.
"""

import math
from dataclasses import dataclass
from typing import Literal

from umbel.aggregation.types import RATE_MAX, RATE_MIN, ROUNDS_MAX, TARGET_MAX, require_within

_FALL = 0.1
_CLOSE = 1e-8  # relative: two last digits of nine


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """How the learning rate changes over the rounds. Keys without an effect on the schedule are refused."""

    name: Literal["constant", "step", "cosine"] = "constant"
    every: int | None = None  # "step": rounds between two falls
    factor: float | None = None  # "step": what each fall multiplies the rate by; None: 0.1
    final: float | None = None  # "cosine": the share of the rate at the end; None: 0
    warm_up_rounds: int = 0  # in which the rate rises to the whole
    per_clients: int | None = None  # the target that `learning_rate` is meant for; None: no scaling
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        if self.name == "step" and self.every is None:
            raise ValueError('name = "step" needs `every`: the number of rounds after which the rate falls')
        for key, owner in (("every", "step"), ("factor", "step"), ("final", "cosine")):
            if getattr(self, key) is not None and self.name != owner:
                raise ValueError(f'`{key}` is for name = "{owner}", not for "{self.name}": leave it out')
        if self.every is not None:
            require_within(self.every, "every", 1, ROUNDS_MAX)
        if self.factor is not None:
            require_within(self.factor, "factor", 1e-6, 1e3)
        if self.final is not None:
            require_within(self.final, "final", 0.0, 1.0)
        require_within(self.warm_up_rounds, "warm_up_rounds", 0, ROUNDS_MAX)
        if self.per_clients is not None:
            require_within(self.per_clients, "per_clients", 1, TARGET_MAX)

    def share(self, number: int, n_rounds: int) -> float:
        """The share of the rate in round `number`, from 1."""
        if number <= self.warm_up_rounds:
            return number / self.warm_up_rounds
        before = number - 1 - self.warm_up_rounds
        match self.name:
            case "constant":
                return 1.0
            case "step":
                assert self.every is not None, "checked at the start"
                return float((_FALL if self.factor is None else self.factor) ** (before // self.every))
            case "cosine":
                final, total = self.final or 0.0, max(1, n_rounds - self.warm_up_rounds)
                return final + (1 - final) * (1 + math.cos(math.pi * min(before, total) / total)) / 2


@dataclass(frozen=True, slots=True)
class RatePlan:
    """A schedule with all that it needs to give the learning rate of any round: the same for all rounds of a run, as
    long as no override changes its numbers.
    """

    schedule: RateSchedule
    learning_rate: float  # the run file's
    n_rounds: int
    target: int  # of the round

    def __post_init__(self) -> None:
        require_within(self.learning_rate, "learning_rate", RATE_MIN, RATE_MAX)
        require_within(self.n_rounds, "n_rounds", 1, ROUNDS_MAX)
        require_within(self.target, "target", 1, TARGET_MAX)

    def rate(self, number: int) -> float:
        """The learning rate of round `number`, from 1, rounded to nine digits; at least `RATE_MIN`."""
        per_clients = self.schedule.per_clients
        scale = 1.0 if per_clients is None else self.target / per_clients
        rate = self.learning_rate * scale * self.schedule.share(number, self.n_rounds)
        return float(f"{min(max(rate, RATE_MIN), RATE_MAX):.9g}")

    def gives(self, learning_rate: float, number: int) -> bool:
        """Whether this is the rate of round `number`, on whatever machine it was computed."""
        return math.isclose(learning_rate, self.rate(number), rel_tol=_CLOSE)
