"""The numbers of private rounds: step, noise, bits, and what the rounds cost of the budget.

They do not follow from the round before, because what a round shows has noise in it. From the first round on, the step
is that of an update of the greatest norm.
"""

import math
from dataclasses import dataclass, replace

from umbel.aggregation.codec.kernels.blocks import Blocks
from umbel.aggregation.codec.residue_bits import SIGMAS
from umbel.aggregation.codec.step import first_plan
from umbel.aggregation.logarithms import ceil_log2
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.plans.masks import SecurePlan
from umbel.aggregation.plans.noise import NoisePlan
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.privacy.accounting import Ledger, PublishedSum
from umbel.aggregation.privacy.section import PrivacySection
from umbel.aggregation.types import RESIDUE_BITS_MAX

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


def noisy_bits(
    noise: NoisePlan, *, inverse_step: float, sigma_sum: float, n_clients: int, sigmas: float = SIGMAS
) -> int:
    """How many bits hold a coordinate of the sum of `n_clients` with its noise, up to `sigmas` standard deviations.

    `sigma_sum`: the expected standard deviation of the sum without noise, in units of the weights
    (`residue_bits.bits_for`). The variances of the sum, of the noise and of the rounding add up. Raises `ValueError`
    for more than 32 bits.
    """
    if not (n_clients >= 1 and inverse_step > 0 and 0 <= sigma_sum < math.inf and sigmas > 0):
        raise ValueError("clients, the step and sigmas must be positive, and sigma_sum must not be negative")
    in_steps = sigma_sum * inverse_step
    variance = in_steps * in_steps + n_clients * (_ROUNDING_VARIANCE + noise.variance_per_client)
    bits = max(1, ceil_log2(min(2 * sigmas * math.sqrt(variance), 2.0**1000)))
    if bits > RESIDUE_BITS_MAX:
        raise ValueError(f"the sum and its noise take {bits} bits, more than {RESIDUE_BITS_MAX}; take a larger step")
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
