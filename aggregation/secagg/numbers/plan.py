"""What a round says of the numbers that are masked; and how it follows from the round before.

Beside the codec's plan, which has the step D, its key and the clip norm. A client multiplies its clipped change x by
its weight w over `weight_unit`, rotates it and rounds it on D (`codec/rotated.py`); what is added up is those integers
modulo 2^bits. So the bits do not grow with the weights:

    mean = (sum of levels) D weight_unit / (sum of w)

The unit is the same in all rounds of a run. It is a guess at a usual weight, and what it is off by the step makes good
from the second round on, for that is measured on weighted changes.

The first round knows neither norms nor weights, and both may be off by orders of magnitude. A step that is too coarse
only adds noise; a sum that wraps destroys the model. So it takes as many bits as no sum can exceed, whatever the levels
are, and a step with which the expected update stands at 64 levels a value: weights (or norms) a hundredth of what was
expected are rounded at 1.6 of their own root mean squares, those a hundred times as large are not shortened yet. Every
later round takes the bits that hold a Gaussian sum at half as much again as the last one showed (`codec/modular.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from umbel.aggregation.codec.kernels.packing import BITS_MAX
from umbel.aggregation.codec.kernels.quantize import LEVEL_MAX
from umbel.aggregation.codec.modular import ALARM_SHARE, bits_for
from umbel.aggregation.codec.plan import CodecPlan
from umbel.aggregation.codec.rotated import COHORT_MAX
from umbel.aggregation.metric_names import METRICS_MAX, require_metric_name
from umbel.aggregation.privacy.noise_plan import NoisePlan
from umbel.aggregation.secagg.numbers.work_floor import ALL_STEPS

MINIMUM_LEAST = 3  # with two clients in a sum, each reads the other
WEIGHT_UNIT_MAX = 1 << 40
FIRST_RMS = 64.0  # levels: between the one step and the 32,766 / 5 to which clients shorten their changes
GROWTH = 1.5  # of the sum's spread from one round to the next


@dataclass(frozen=True, slots=True)
class SumShown:
    """What the sum of a committed round has shown, for the numbers of the next; public, as the sum is.

    `update_rms`: the mean of the weighted changes' root mean squares; `spread`: the greatest root mean square that a
    block of the rotated sum has, without the noise that clients have added, but with what rounding has, for that
    depends on how far they agree; both in units of the weights, times w / `weight_unit`. `share_near_the_edge`: of
    coordinates beyond three quarters of what the bits hold.
    """

    n_clients: int
    update_rms: float
    spread: float
    share_near_the_edge: float

    def __post_init__(self) -> None:
        if not 1 <= self.n_clients <= COHORT_MAX:
            raise ValueError(f"a sum has 1 to {COHORT_MAX} clients, not {self.n_clients}")
        if not (0 <= self.update_rms < math.inf and 0 <= self.spread < math.inf):
            raise ValueError("update_rms and spread must be finite and not negative")
        if not 0 <= self.share_near_the_edge <= 1:
            raise ValueError(f"share_near_the_edge must lie between 0 and 1, not {self.share_near_the_edge!r:.40}")


@dataclass(frozen=True, slots=True)
class SecurePlan:
    """What all members of a secure round must agree on, beside the codec's plan.

    `bits`: of a level on the wire, modulo 2^bits. `weight_unit`: the weight at which a change is rounded as it is.
    `clients_max`: the most clients, and draws, that the round asks; `minimum`: the fewest that a sum may have.
    `is_proportional`: whether a client weighs as often as it was drawn, or as many samples as it has. `metrics`,
    `evaluation`: the names that are added up, of those that training and held-out data give; others stay at the client.
    `noise`: of a private round, what each client adds to its levels (`privacy/`); clients then all weigh the same, and
    say nothing else of what they did. `minimum_work`: the least share of its planned steps that a client must have done
    to send its update; 0: one step (`work_floor.py`).
    """

    bits: int
    weight_unit: int
    clients_max: int
    minimum: int = MINIMUM_LEAST
    is_proportional: bool = False
    metrics: tuple[str, ...] = ()
    evaluation: tuple[str, ...] = ()
    noise: NoisePlan | None = None
    minimum_work: float = ALL_STEPS

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= BITS_MAX:
            raise ValueError(f"bits must lie between 1 and {BITS_MAX}, not {self.bits}; take a larger step")
        if not 1 <= self.weight_unit <= WEIGHT_UNIT_MAX:
            raise ValueError(f"weight_unit must lie between 1 and 2^40, not {self.weight_unit}")
        if not MINIMUM_LEAST <= self.minimum <= self.clients_max <= COHORT_MAX:
            raise ValueError(
                f"a secure sum has {MINIMUM_LEAST} to {COHORT_MAX} clients; minimum = {self.minimum} of "
                f"{self.clients_max} is no such number"
            )
        if self.noise is not None and (
            self.metrics or self.evaluation or self.is_proportional or self.weight_unit != 1
        ):
            raise ValueError("in a private round nothing travels without noise: no metrics, and no weights")
        if not 0 <= self.minimum_work <= 1:  # also refuses a NaN
            raise ValueError(f"minimum_work is a share of the steps, 0 to 1, not {self.minimum_work!r:.40}")
        for names in (self.metrics, self.evaluation):
            require_metric_names(names)

    def unwrapping(self) -> SecurePlan:
        """The same with as many bits as no sum of these clients can exceed, whatever they send in good faith.

        For the first round, and for an attempt after one that has failed: its sum may have wrapped.
        """
        if self.noise is not None:
            return self  # its norms are bounded, and its bits hold what they add up to
        return replace(self, bits=(self.clients_max * LEVEL_MAX).bit_length() + 1)

    @property
    def noise_variance(self) -> float:
        """Of the noise in each level of one client, in squared steps."""
        return 0.0 if self.noise is None else self.noise.variance_per_client

    def after(self, codec: CodecPlan, shown: SumShown, *, clients_max: int, minimum: int) -> SecurePlan:
        """The plan of the round after this one. `codec`: of that round; `shown`: by this one; the rest: as that asks.

        The sum is expected to have as large a share of each client as before, or at least what clients add up to that
        have nothing in common: updates that cancelled in one cohort need not in the next.
        """
        asked = replace(self, clients_max=clients_max, minimum=minimum).unwrapping()
        if not shown.update_rms:
            return asked  # nothing has changed, so nothing is known of what comes
        ratio = clients_max / shown.n_clients
        expected = max(
            GROWTH * shown.spread * (ratio if ratio > 1 else math.sqrt(ratio)),
            math.sqrt(clients_max) * shown.update_rms,
        )
        bits = bits_for(inverse_step=codec.inverse_step, sigma_sum=expected, n_clients=clients_max)
        bits += shown.share_near_the_edge > ALARM_SHARE
        return replace(asked, bits=min(bits, asked.bits))

    @property
    def words(self) -> str:
        """For people: `masked in 9 bits, weight unit 128`."""
        return f"masked in {self.bits} bits, weight unit {self.weight_unit}"


def first_plans(
    codec: CodecPlan,
    *,
    weight_unit: int,
    clients_max: int,
    minimum: int,
    is_proportional: bool = False,
    metrics: tuple[str, ...] = (),
    evaluation: tuple[str, ...] = (),
    minimum_work: float = ALL_STEPS,
) -> tuple[CodecPlan, SecurePlan]:
    """The numbers of a run's first round. `codec`: the integer codec at a step of the root mean square that a client's
    change of weight `weight_unit` is expected to have.
    """
    secure = SecurePlan(1, weight_unit, clients_max, minimum, is_proportional, metrics, evaluation, None, minimum_work)
    return codec.at_step(1 / codec.inverse_step / FIRST_RMS), secure.unwrapping()


def require_metric_names(names: Sequence[str]) -> None:
    """Raise `ValueError` for more than 64 names, one that stands twice, or one that no metric has."""
    if len(names) > METRICS_MAX or len(set(names)) < len(names):
        raise ValueError(f"name at most {METRICS_MAX} metrics, and each of them once")
    for name in names:
        require_metric_name(name)
