"""The run file's section [privacy], checked; the numbers of private rounds, and what the rounds cost of the budget.

The numbers (step, noise, bits) do not follow from the round before, because what a round shows has noise in it. From
the first round on, the step is that of an update of the greatest norm.
"""

import math
from dataclasses import dataclass, replace

from umbel.aggregation.codec.step import SIGMAS, first_plan
from umbel.aggregation.kernels.arguments import Blocks
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.plans.masks import NoisePlan, SecurePlan, require_honest
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.privacy.accounting import Ledger, PublishedSum, allowance
from umbel.aggregation.privacy.sensitivity import rounded_bound
from umbel.aggregation.stated_order import ceil_log2
from umbel.aggregation.types import NORM_MAX, NORM_MIN, RESIDUE_BITS_MAX, TARGET_MAX, require_within

EPSILON_MIN, EPSILON_MAX = 0.01, 100.0
DELTA_MIN, DELTA_MAX = 1e-12, 0.01
NOISE_MULTIPLIER_MIN, NOISE_MULTIPLIER_MAX = 0.01, 10_000.0


@dataclass(frozen=True, slots=True)
class PrivacySection:
    """Either a budget for the whole run (`epsilon` at `delta`), or a `noise_multiplier` for each round.

    With a noise multiplier, the epsilon that the run has cost is reported at `delta`. The privacy unit is one client.
    """

    epsilon: float | None = None  # for all rounds of the run together
    delta: float = 1e-6
    noise_multiplier: float | None = None  # the noise's standard deviation in the sum, over the greatest norm of a part
    clip_norm: float | None = None  # the greatest L2 norm of an update; None: that of [codec]
    colluders: int = 1  # clients of the smallest cohort that may add no noise, or tell others theirs
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError(
                "set exactly one of epsilon (a budget for the whole run) and noise_multiplier (the noise of each round)"
            )
        for name, least, most in (
            ("epsilon", EPSILON_MIN, EPSILON_MAX),
            ("delta", DELTA_MIN, DELTA_MAX),
            ("noise_multiplier", NOISE_MULTIPLIER_MIN, NOISE_MULTIPLIER_MAX),
            ("clip_norm", NORM_MIN, NORM_MAX),
            ("colluders", 0, TARGET_MAX),
        ):
            if (value := getattr(self, name)) is not None:
                require_within(value, name, least, most)

    def clip(self, of_codec: float | None) -> float:
        """The clip norm of [privacy], or `of_codec`, that of [codec]. Raises `ValueError` for none, or for two."""
        found = {one for one in (self.clip_norm, of_codec) if one is not None}
        if not found:
            raise ValueError("set clip_norm in [privacy]: without one, a client's part in the sum has no bound")
        if len(found) > 1:
            raise ValueError("[privacy] and [codec] have different values of clip_norm; set it in only one of them")
        return found.pop()

    def plan(self, *, rounds: int, least: int, n_values: int, inverse_step: float, clip_norm: float) -> NoisePlan:
        """The noise of a round.

        `rounds`: the most sums that the run reveals. `least`: the fewest clients in a revealed sum, which is the larger
        of the run's minimum and the secret sharing's threshold. `n_values`: the levels of an update
        (`Rotated.n_levels`). `inverse_step`: levels per unit of a weight. `clip_norm`: from `clip`, in weights.

        Raises `ValueError` for numbers that no noise satisfies, and `AccountantMissing` for a budget.
        """
        require_honest(least, self.colluders)
        bound = rounded_bound(clip_norm * inverse_step, n_values)
        if self.epsilon is not None:
            variance = allowance(self.epsilon, self.delta, rounds).variance(bound, n_values)
        else:
            assert self.noise_multiplier is not None, "the constructor requires one of the two"
            variance = self.noise_multiplier**2 * bound
        return NoisePlan.of(variance, bound, n_values, least=least, colluders=self.colluders)


def require_private_model(layout: Layout) -> None:
    """Raise `ValueError` for a model whose updates have exact tensors, whose values would travel without noise."""
    if exact := [spec.name for spec in layout.update.owners() if not spec.is_coded]:
        raise ValueError(
            f"[privacy] cannot add noise to integer tensors or running statistics, and the model has some "
            f"({', '.join(exact[:3])}): build it without them, such as with GroupNorm or LayerNorm instead of "
            "BatchNorm, or list them under `private` in [tensors]"
        )


_ROUNDING_VARIANCE = 1 / 4  # of rounding one value, at most, in squared steps
_LIBRARIES = 2.0**-32  # how far the logarithms of two machines may move a variance; a quarter of its slack


@dataclass(frozen=True, slots=True)
class PrivacySpent:
    """What a private run has cost so far."""

    epsilon: float
    delta: float
    budget: float | None  # the epsilon that the whole run may cost; None where the run file sets the noise instead
    sums: int  # revealed so far
    sums_max: int

    @property
    def words(self) -> str:
        """For people: `epsilon 5.33 of 8 is spent, at delta 1e-06, by 2 of at most 4 sums`."""
        of_budget = "" if self.budget is None else f" of {self.budget:g}"
        sums = counted(self.sums_max, "sum")
        return (
            f"epsilon {self.epsilon:.3g}{of_budget} is spent, at delta {self.delta:g}, by {self.sums} of at most {sums}"
        )


def release_of(noise: NoisePlan) -> PublishedSum:
    """The round's sum in the worst case, as the accountant charges it."""
    return PublishedSum(
        noise.variance_per_client * (noise.least - noise.colluders), noise.bound_squared, noise.n_values
    )


def noisy_bits(noise: NoisePlan, *, inverse_step: float, sigma_sum: float, n_clients: int) -> int:
    """The bits that hold a coordinate of the sum of `n_clients` with its noise, up to `SIGMAS` standard deviations.

    `sigma_sum`: as in `codec/step.bits_for`. The variances of the sum, of the noise and of the rounding add up. Raises
    `ValueError` for more than 32 bits.
    """
    if not (n_clients >= 1 and inverse_step > 0 and 0 <= sigma_sum < math.inf):
        raise ValueError("clients and the step must be positive, and sigma_sum must not be negative")
    in_steps = sigma_sum * inverse_step
    variance = in_steps * in_steps + n_clients * (_ROUNDING_VARIANCE + noise.variance_per_client)
    bits = max(1, ceil_log2(min(2 * SIGMAS * math.sqrt(variance), 2.0**1000)))
    if bits > RESIDUE_BITS_MAX:
        raise ValueError(
            f"a value of the sum with its noise takes {bits} bits, but a masked update has at most {RESIDUE_BITS_MAX} "
            "bits for each value; take a larger step"
        )
    return bits


def private_numbers(
    section: PrivacySection,
    step: float,
    clip_of_codec: float | None,
    plan: RoundPlan,
    n_values: int,
    rounds: int,
    signed: NoisePlan | None = None,
) -> tuple[CodecPlan, SecurePlan]:
    """The numbers of a run's first round, which the later rounds repeat (`again`).

    `step`: in root mean squares of an update whose norm is the clip norm. `rounds`: the most sums that the run reveals.
    `signed`: for an auditor, the noise in a plan that another machine made. It is used if this machine's noise differs
    only in the last digits of the variance, which depend on the machine's logarithms.
    Raises `ValueError` for numbers that no noise satisfies, and `AccountantMissing` for a budget without dp-accounting.
    """
    clip = section.clip(clip_of_codec)
    codec = first_plan(step=step, norm=clip, n_values=n_values, key=0, clip_norm=clip)
    n_levels, n_clients = Blocks.of(n_values).n_padded, plan.n_wanted
    noise = section.plan(
        rounds=rounds, least=plan.minimum, n_values=n_levels, inverse_step=codec.inverse_step, clip_norm=clip
    )
    noise = signed if signed is not None and _is_alike(signed, noise) else noise
    together = n_clients * clip / math.sqrt(n_levels)  # if all clients' updates were the same
    bits = noisy_bits(noise, inverse_step=codec.inverse_step, sigma_sum=together, n_clients=n_clients)
    return codec, SecurePlan(bits, 1, n_clients, plan.minimum, noise=noise)


def _is_alike(signed: NoisePlan, found: NoisePlan) -> bool:
    return math.isclose(signed.variance_per_client, found.variance_per_client, rel_tol=_LIBRARIES) and (
        replace(signed, variance_per_client=found.variance_per_client) == found
    )


def again(before: tuple[CodecPlan, SecurePlan], key: int) -> tuple[CodecPlan, SecurePlan]:
    """The numbers of the next round: the same, with a rotation of its own."""
    codec, secure = before
    return replace(codec, key=key), secure


def epsilon_after(noise: NoisePlan, delta: float, n_releases: int) -> float:
    """What `n_releases` sums with this noise have cost. Raises `AccountantMissing`."""
    return Ledger(delta).after(release_of(noise), n_releases).epsilon if n_releases else 0.0


def spent_after(section: PrivacySection, noise: NoisePlan, n_releases: int, sums_max: int) -> PrivacySpent:
    """What `n_releases` sums of a run have cost of its budget. Raises `AccountantMissing`."""
    epsilon = epsilon_after(noise, section.delta, n_releases)
    return PrivacySpent(epsilon, section.delta, section.epsilon, n_releases, sums_max)
