"""The numbers of a secure round that all its members agree on, as plain data. `secagg/numbers/plan.py` makes them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from umbel.aggregation.plans.noise import NoisePlan
from umbel.aggregation.types import COHORT_MAX, LEVEL_MAX, RESIDUE_BITS_MAX, require_metric_names

MINIMUM_LEAST = 3  # with two clients in a sum, each reads the other
WEIGHT_UNIT_MAX = 1 << 40
ALL_STEPS, ONE_STEP = 1.0, 0.0  # the least share of its planned steps that a client must have done


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
        if not 1 <= self.bits <= RESIDUE_BITS_MAX:
            raise ValueError(f"bits must lie between 1 and {RESIDUE_BITS_MAX}, not {self.bits}; take a larger step")
        if not 1 <= self.weight_unit <= WEIGHT_UNIT_MAX:
            raise ValueError(f"weight_unit must lie between 1 and 2^40, not {self.weight_unit}")
        if not MINIMUM_LEAST <= self.minimum <= self.clients_max <= COHORT_MAX:
            raise ValueError(
                f"a secure sum has {MINIMUM_LEAST} to {COHORT_MAX} clients; minimum = {self.minimum} of "
                f"{self.clients_max} is no such number"
            )
        if self.is_private and (self.metrics or self.evaluation or self.is_proportional or self.weight_unit != 1):
            raise ValueError("a private round sends nothing without noise: leave out metrics and weights")
        if not 0 <= self.minimum_work <= 1:  # also refuses a NaN
            raise ValueError(f"minimum_work is a share of the steps, 0 to 1, not {self.minimum_work!r:.40}")
        for names in (self.metrics, self.evaluation):
            require_metric_names(names)

    def unwrapping(self) -> SecurePlan:
        """The same with as many bits as no sum of these clients can exceed, whatever they send in good faith.

        For the first round, and for an attempt after one that has failed: its sum may have wrapped.
        """
        if self.is_private:
            return self  # its norms are bounded, and its bits hold what they add up to
        return replace(self, bits=(self.clients_max * LEVEL_MAX).bit_length() + 1)

    @property
    def is_private(self) -> bool:
        """Whether clients add noise."""
        return self.noise is not None

    @property
    def noise_variance(self) -> float:
        """Of the noise in each level of one client, in squared steps."""
        return self.noise.variance_per_client if self.noise else 0.0

    @property
    def words(self) -> str:
        """For people: `masked in 9 bits, weight unit 128`."""
        return f"masked in {self.bits} bits, weight unit {self.weight_unit}"
