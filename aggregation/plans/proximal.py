"""FedProx's mu from round to round, where it adapts to the training loss; as plain data.

The rule is that of Li et al. 2020, "Federated Optimization in Heterogeneous Networks", section 5.3: mu rises by 0.1
when the loss rises, and falls by 0.1 when the loss has fallen in five rounds in a row. It never falls below 0. The
paper begins with 1 for IID data, and with 0 for other data. It does not say how falls are counted after a step: here
the count begins anew after each step of mu, and after a loss that has not fallen.

The loss is the mean training loss in the record of a committed round. It is rounded to nine digits before it is
compared, because the last bits of a mean depend on the order of the reports. A round without a loss changes nothing.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from umbel.aggregation.canonical import later
from umbel.aggregation.types import METRIC_ABS_MAX, RATE_MAX, require_within

LOSS = "loss"  # the metric that is compared
MU_STEP = 0.1
MU_STEP_MIN = 1e-6
FALLS = 5  # of the loss in a row, before mu falls
_CLOSE = 1e-8  # of the greatest mu that is allowed, at least of 1


@dataclass(frozen=True, slots=True)
class MuState:
    """The mu of one round, and what the next one follows from."""

    proximal_mu: float  # of the round, rounded to nine digits after each step
    loss: float | None = None  # of the newest round before it that had one, rounded to nine digits
    falls: int = 0  # of the loss in a row, up to that round, since mu last changed

    def __post_init__(self) -> None:
        require_within(self.proximal_mu, "proximal_mu", 0.0, RATE_MAX)
        if self.loss is not None and not abs(self.loss) <= METRIC_ABS_MAX:  # also refuses a NaN
            raise ValueError(f"loss must lie within +-{METRIC_ABS_MAX:g}, not {self.loss}")
        require_within(self.falls, "falls", 0, FALLS - 1)


@dataclass(frozen=True, slots=True)
class MuRule:
    """How mu adapts: the same for all rounds of a run."""

    proximal_mu: float  # of the first round
    step: float
    most: float = later(RATE_MAX)  # mu never rises above it

    def __post_init__(self) -> None:
        require_within(self.most, "most", MU_STEP_MIN, RATE_MAX)
        require_within(self.proximal_mu, "proximal_mu", 0.0, self.most)
        require_within(self.step, "step", MU_STEP_MIN, RATE_MAX)

    @property
    def first(self) -> MuState:
        """The mu of round 1."""
        return MuState(self.proximal_mu)

    def after(self, before: MuState, loss: float | None) -> MuState:
        """The mu of the next round. `before`: of a committed round; `loss`: of the same round, None without one."""
        if loss is None:
            return before
        loss = _nine_digits(loss)
        if before.loss is None:
            return MuState(before.proximal_mu, loss)
        if loss > before.loss:
            return MuState(_nine_digits(min(before.proximal_mu + self.step, self.most)), loss)
        falls = before.falls + 1 if loss < before.loss else 0
        if falls == FALLS:
            return MuState(_nine_digits(max(before.proximal_mu - self.step, 0.0)), loss)
        return MuState(before.proximal_mu, loss, falls)

    def after_versions(self, versions: Iterable[tuple[int | None, float | None]]) -> list[MuState]:
        """The mu of a round that begins with each version of a run's model.

        `versions`: in order from version 0 on, the version that each copies (after a rollback), and the loss of the
        round that made it. A copy comes with the mu of the version that it copies.
        """
        found = list[MuState]()
        for copied, loss in versions:
            if not found:
                found.append(self.first)
            else:
                found.append(self.after(found[-1], loss) if copied is None else found[copied])
        return found

    def allows(self, proximal_mu: float, n_rounds_before: int) -> bool:
        """Whether some losses of `n_rounds_before` committed rounds lead to this mu."""
        n_compared = max(n_rounds_before - 1, 0)
        least = max(self.proximal_mu - self.step * (n_compared // FALLS), 0.0)
        most = min(self.proximal_mu + self.step * n_compared, self.most)
        slack = _CLOSE * max(most, 1.0)
        return least - slack <= proximal_mu <= most + slack


def _nine_digits(value: float) -> float:
    assert math.isfinite(value), "checked where it was reported"
    return float(f"{value:.9g}")
