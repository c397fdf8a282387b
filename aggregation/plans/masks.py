"""What all clients of a secure round agree on: the numbers of its sum, and the noise of a private one; plain data."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from umbel.aggregation.canonical import later
from umbel.aggregation.counts import require_lengths
from umbel.aggregation.types import COHORT_MAX, LEVEL_MAX, RESIDUE_BITS_MAX, MetricNames, require_metric_names

BOUND_MAX = (1 << 53) - 1  # what every reader of JSON holds exactly
VARIANCE_MIN, VARIANCE_MAX = 2.0**-20, 2.0**34
NOISE_VALUES_MAX = 1 << 40
_SLACK = 1 + 2.0**-50  # so that the quotient, times what divided it, is no less


@dataclass(frozen=True, slots=True)
class NoisePlan:
    """The noise that each client of a private round adds. It is enough even if other clients drop out or cheat.

    A sum is revealed only if `least` clients or more are in it. Of these, `colluders` may have added no noise, or told
    the coordinator theirs. So each client adds

        variance per client = mu / (least - colluders)

    for a sum that needs mu. Ten clients, of which seven must remain and three may collude, add 2.5 times as much as ten
    trusted clients would.
    """

    variance_per_client: float  # in each level, in squared steps
    bound_squared: int  # the greatest sum of squares of one client's levels
    n_values: int  # levels of a client
    least: int  # the fewest clients in a revealed sum
    colluders: int = 0

    def __post_init__(self) -> None:
        for name, most in (("bound_squared", BOUND_MAX), ("n_values", NOISE_VALUES_MAX), ("least", COHORT_MAX)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} must lie between 1 and {most}, not {getattr(self, name)!r:.40}")
        require_honest(self.least, self.colluders)
        if not VARIANCE_MIN <= self.variance_per_client <= VARIANCE_MAX:
            raise ValueError(
                f"the noise of each client would have a variance of {self.variance_per_client!r:.40} squared steps; it "
                "must lie between 2^-20 and 2^34. Take a larger step, or less noise"
            )

    @classmethod
    def of(cls, variance: float, bound_squared: int, n_values: int, *, least: int, colluders: int) -> "NoisePlan":
        """`variance`: what the honest clients of the least cohort are to add together."""
        require_honest(least, colluders)
        share = max(variance / (least - colluders) * _SLACK, VARIANCE_MIN)
        return cls(share, bound_squared, n_values, least, colluders)


def require_honest(least: int, colluders: int) -> None:
    """Raise `ValueError` unless a sum of `least` clients has at least one honest client."""
    if not 0 <= colluders < least:
        raise ValueError(
            f"colluders must lie between 0 and {least - 1}, not {colluders!r:.40}: one of the {least} clients in the "
            "smallest sum must be honest"
        )


MINIMUM_LEAST = 3  # with two clients in a sum, each reads the other
WEIGHT_UNIT_MAX = 1 << 40
ALL_STEPS, ONE_STEP = 1.0, 0.0  # the least share of its planned steps that a client must have done


@dataclass(frozen=True, slots=True)
class SumShown:
    """What the sum of a committed round has shown, for the numbers of the next. It is public, as the sum is.

    `update_rms` and `spread` are in units of the weights, times w / `weight_unit`.
    """

    n_clients: int
    update_rms: float  # the mean of the weighted changes' root mean squares
    spread: (
        float  # the greatest root mean square of a block of the rotated sum, with rounding but without clients' noise
    )
    share_near_the_edge: float  # of coordinates beyond three quarters of what the bits hold

    def __post_init__(self) -> None:
        if not 1 <= self.n_clients <= COHORT_MAX:
            raise ValueError(f"a sum has 1 to {COHORT_MAX} clients, not {self.n_clients}")
        if not (0 <= self.update_rms < math.inf and 0 <= self.spread < math.inf):
            raise ValueError("update_rms and spread must be finite and not negative")
        if not 0 <= self.share_near_the_edge <= 1:
            raise ValueError(f"share_near_the_edge must lie between 0 and 1, not {self.share_near_the_edge!r:.40}")


@dataclass(frozen=True, slots=True)
class SecurePlan:
    """What all clients of a secure round must agree on, beside the codec's plan.

    In a private round all clients weigh the same, and report nothing else of their work.
    """

    bits: int  # of a level on the wire, modulo 2^bits
    weight_unit: int  # the weight of a change that is rounded unscaled
    clients_max: int  # the most clients, and draws, that the round asks
    minimum: int = MINIMUM_LEAST  # the fewest clients in a sum
    is_proportional: bool = False  # must be false: clients weigh their samples, not their draws
    metrics: MetricNames = ()  # of training, that are added up; others stay at the client
    evaluation: MetricNames = ()  # likewise, of held-out data
    noise: NoisePlan | None = None  # of a private round
    minimum_work: float = ALL_STEPS  # the least share of the planned steps of an update that is sent; 0: one step
    counts: Mapping[str, int] = later(factory=dict[str, int])  # of training, that are added up: each name's length
    evaluation_counts: Mapping[str, int] = later(factory=dict[str, int])  # likewise, of held-out data
    is_normalised: bool = later(False)  # changes are divided by the steps done, and weight times steps is added up

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= RESIDUE_BITS_MAX:
            raise ValueError(f"bits must lie between 1 and {RESIDUE_BITS_MAX}, not {self.bits}; take a larger step")
        if not 1 <= self.weight_unit <= WEIGHT_UNIT_MAX:
            raise ValueError(f"weight_unit must lie between 1 and 2^40, not {self.weight_unit}")
        if not MINIMUM_LEAST <= self.minimum <= self.clients_max <= COHORT_MAX:
            raise ValueError(
                f"minimum must be at least {MINIMUM_LEAST}, and clients_max at least minimum and at most {COHORT_MAX}; "
                f"they are {self.minimum} and {self.clients_max}"
            )
        is_measured = self.metrics or self.evaluation or self.counts or self.evaluation_counts
        if self.is_private and (is_measured or self.is_proportional or self.weight_unit != 1):
            raise ValueError(
                "in a private round, every value that a client sends must have noise: leave out `metrics`, "
                "`evaluation`, `counts` and `evaluation_counts`, and give all clients the same weight"
            )
        if self.is_private and self.is_normalised:
            raise ValueError("in a private round, nothing is said of steps, by which changes could be divided")
        if not 0 <= self.minimum_work <= 1:  # also refuses a NaN
            raise ValueError(
                f"minimum_work, a share of the steps, must lie between 0 and 1, not {self.minimum_work!r:.40}"
            )
        for names in (self.metrics, self.evaluation):
            require_metric_names(names)
        for lengths in (self.counts, self.evaluation_counts):
            require_lengths(lengths)

    def unwrapping(self) -> "SecurePlan":
        """A copy whose bits hold every sum of honest clients: for a first round or a repeated attempt."""
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
