"""The numbers of private rounds, which do not follow from one another: what a round shows has noise in it, and the step
from the first round on is that of an update of the greatest norm.
"""

import math
from dataclasses import replace

from umbel.aggregation.codec.kernels.blocks import Blocks
from umbel.aggregation.codec.step import first_plan
from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.plans.masks import SecurePlan
from umbel.aggregation.plans.noise import NoisePlan
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.privacy.accounting import Ledger
from umbel.aggregation.privacy.noise import noisy_bits, release_of
from umbel.aggregation.privacy.section import PrivacySection
from umbel.aggregation.run.records import PrivacySpent

_LIBRARIES = 2.0**-32  # what the logarithms of two machines may change of a variance; a quarter of its slack


def private_numbers(
    section: PrivacySection,
    step: float,
    clip_of_codec: float | None,
    plan: RoundPlan,
    n_values: int,
    rounds: int,
    told: NoisePlan | None = None,
) -> tuple[CodecPlan, SecurePlan]:
    """The numbers of a run's first round; the later ones have them, too (`again`).

    `step`: in root mean squares of an update whose norm is the clip norm. `rounds`: how many sums the run may reveal.
    `told`: the noise of a plan that another machine made, for an auditor. It is taken where this machine finds the same
    but for the last digits of the variance, which logarithms decide.
    Raises `ValueError` for what cannot be kept, `AccountantMissing` for a budget where dp-accounting is not installed.
    """
    clip = section.clip(clip_of_codec)
    codec = first_plan(step=step, norm=clip, n_values=n_values, key=0, clip_norm=clip)
    n_levels, n_clients = Blocks.of(n_values).n_padded, plan.n_wanted
    noise = section.plan(
        rounds=rounds, least=plan.minimum, n_values=n_levels, inverse_step=codec.inverse_step, clip_norm=clip
    )
    noise = told if told is not None and _is_alike(told, noise) else noise
    together = n_clients * clip / math.sqrt(n_levels)  # if all clients' updates were the same
    bits = noisy_bits(noise, inverse_step=codec.inverse_step, sigma_sum=together, n_clients=n_clients)
    return codec, SecurePlan(bits, 1, n_clients, plan.minimum, noise=noise)


def _is_alike(told: NoisePlan, found: NoisePlan) -> bool:
    return math.isclose(told.variance_per_client, found.variance_per_client, rel_tol=_LIBRARIES) and (
        replace(told, variance_per_client=found.variance_per_client) == found
    )


def again(before: tuple[CodecPlan, SecurePlan], key: int) -> tuple[CodecPlan, SecurePlan]:
    """The numbers of the next round; its rotation is its own."""
    codec, secure = before
    return replace(codec, key=key), secure


def epsilon_after(noise: NoisePlan, delta: float, n_releases: int) -> float:
    """What so many sums with this noise have cost. Raises `AccountantMissing`."""
    return Ledger(delta).after(release_of(noise), n_releases).epsilon if n_releases else 0.0


def spent_after(section: PrivacySection, noise: NoisePlan, n_releases: int, sums_max: int) -> PrivacySpent:
    """What so many sums of a run have cost of its budget. Raises `AccountantMissing`."""
    epsilon = epsilon_after(noise, section.delta, n_releases)
    return PrivacySpent(epsilon, section.delta, section.epsilon, n_releases, sums_max)
