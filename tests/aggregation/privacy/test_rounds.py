"""The numbers of private rounds, as an auditor works them out again on a machine with other last digits."""

from dataclasses import replace

import pytest

from umbel.aggregation.plans.masks import SecurePlan
from umbel.aggregation.plans.noise import NoisePlan
from umbel.aggregation.plans.round import RoundPlan, Weighting
from umbel.aggregation.privacy.rounds import private_numbers
from umbel.aggregation.privacy.section import PrivacySection
from umbel.aggregation.types import RunId

SECTION = PrivacySection(noise_multiplier=1.1, clip_norm=2.0, colluders=0)
PLAN = RoundPlan(RunId("r"), 1, 1, 5, 5, 1.0, 60.0, Weighting.SAMPLES, 100, 64.0, seed=1)


def numbers(told: NoisePlan | None = None) -> SecurePlan:
    return private_numbers(SECTION, 0.5, None, PLAN, 1000, 10, told)[1]


def noise() -> NoisePlan:
    found = numbers().noise
    assert found is not None
    return found


@pytest.mark.parametrize("off", [2.0**-40, -(2.0**-40), 2.0**-33])
def test_a_variance_that_differs_in_its_last_digits_is_taken_as_told(off: float) -> None:
    told = replace(noise(), variance_per_client=noise().variance_per_client * (1 + off))
    assert numbers(told).noise == told


@pytest.mark.parametrize("off", [2.0**-30, -(2.0**-30), -0.1])
def test_a_variance_that_differs_by_more_is_not(off: float) -> None:
    told = replace(noise(), variance_per_client=noise().variance_per_client * (1 + off))
    assert numbers(told).noise == noise() != told


def test_nothing_else_may_differ() -> None:
    for told in (
        replace(noise(), bound_squared=noise().bound_squared + 1),
        replace(noise(), least=noise().least - 1),
        replace(noise(), colluders=noise().colluders + 1),
    ):
        assert numbers(told).noise == noise() != told
