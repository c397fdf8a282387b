"""The numbers of private rounds, as an auditor works them out again on a machine with other last digits."""

import hashlib
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.canonical import canonical
from umbel.aggregation.codec.step import bits_for
from umbel.aggregation.plans.masks import VARIANCE_MAX, VARIANCE_MIN, NoisePlan, SecurePlan
from umbel.aggregation.plans.round import RoundPlan, Weighting
from umbel.aggregation.privacy.section import PrivacySection, noisy_bits, private_numbers, release_of
from umbel.aggregation.privacy.skellam import Skellam
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


def plan(variance_per_client: float = 4.0, *, least: int = 7, colluders: int = 3) -> NoisePlan:
    return NoisePlan(variance_per_client, 100, 1000, least, colluders)


@given(st.floats(1e-3, 1e9), st.integers(1, 1000), st.integers(0, 999))
def test_the_honest_of_the_smallest_sum_add_what_it_needs(variance: float, least: int, colluders: int) -> None:
    colluders %= least
    made = NoisePlan.of(variance, 100, 1000, least=least, colluders=colluders)
    assert variance <= release_of(made).variance
    if made.variance_per_client > VARIANCE_MIN:
        assert release_of(made).variance <= variance * (1 + 1e-12)


def test_ten_clients_of_whom_three_may_drop_out_and_three_collude_add_two_and_a_half_times_as_much() -> None:
    made = NoisePlan.of(100.0, 50, 1000, least=7, colluders=3)
    assert 10 * made.variance_per_client == pytest.approx(250.0)


def test_noise_is_there_when_only_the_least_remain_and_colluders_add_none() -> None:
    """Ten clients, of whom seven remain; three of these send what they like, here nothing."""
    n, needed = 100_000, 50.0
    made = NoisePlan.of(needed, 100, n, least=7, colluders=3)
    total, noise = torch.zeros(n, dtype=torch.int64), Skellam(made.variance_per_client)
    for client in range(made.least - made.colluders):
        noise.add_to(total, hashlib.sha256(bytes([client])).digest())
    variance = float(total.to(torch.float64).square().mean())
    assert variance == pytest.approx(needed, rel=5 * math.sqrt(2 / n))
    assert release_of(made).variance == pytest.approx(needed)
    assert Skellam(release_of(made).variance).draw(bytes(32), 0, n).to(torch.float64).var() == pytest.approx(
        variance, rel=7 * math.sqrt(2 / n)
    )


def test_what_is_charged_is_the_worst_case() -> None:
    release = release_of(plan(4.0))
    assert (release.variance, release.bound_squared, release.n_values) == (16.0, 100, 1000)


@pytest.mark.parametrize(("least", "colluders"), [(3, 3), (3, 4), (3, -1)])
def test_a_sum_with_no_honest_client_for_sure_is_refused(least: int, colluders: int) -> None:
    with pytest.raises(ValueError, match="one of the 3 clients in the smallest sum must be honest"):
        NoisePlan.of(1.0, 100, 1000, least=least, colluders=colluders)
    with pytest.raises(ValueError, match="one of the 3 clients in the smallest sum must be honest"):
        plan(least=least, colluders=colluders)


@pytest.mark.parametrize("variance", [0.0, -1.0, math.nan, math.inf, VARIANCE_MAX * 2])
def test_noise_that_no_client_can_add_is_refused(variance: float) -> None:
    with pytest.raises(ValueError, match="larger step"):
        plan(variance)


@pytest.mark.parametrize(("bound", "n_values"), [(0, 5), (1 << 53, 5), (5, 0)])
def test_a_bound_or_a_length_that_cannot_be_is_refused(bound: int, n_values: int) -> None:
    with pytest.raises(ValueError, match="must lie between"):
        NoisePlan(1.0, bound, n_values, 3)


def test_a_plan_can_be_signed() -> None:
    assert canonical(plan()) == (
        '{"bound_squared":100,"colluders":3,"least":7,"n_values":1000,"variance_per_client":4}'
    )


def test_noise_takes_half_a_bit_for_each_doubling_of_its_variance() -> None:
    bits = [noisy_bits(plan(4.0**i), inverse_step=1.0, sigma_sum=0.0, n_clients=16) for i in range(1, 8)]
    assert [after - before for before, after in pairwise(bits)] == [1] * 6


def test_with_next_to_no_noise_it_takes_the_bits_of_the_sum() -> None:
    quiet = plan(VARIANCE_MIN)
    assert noisy_bits(quiet, inverse_step=8.0, sigma_sum=100.0, n_clients=10) == bits_for(
        inverse_step=8.0, sigma_sum=100.0, n_clients=10
    )


def test_the_sum_and_its_noise_are_within_the_bits() -> None:
    n_clients, loud = 5, plan(900.0)
    bits = noisy_bits(loud, inverse_step=1.0, sigma_sum=0.0, n_clients=n_clients)
    total, noise = torch.zeros(1_000_000, dtype=torch.int64), Skellam(loud.variance_per_client)
    for client in range(n_clients):
        noise.add_to(total, bytes([client] * 32))
    assert int(total.abs().max()) < 1 << (bits - 1)
    assert int(total.abs().max()) > 1 << (bits - 3)


def test_more_than_32_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="larger step"):
        noisy_bits(plan(VARIANCE_MAX), inverse_step=1.0, sigma_sum=1e9, n_clients=10)


@pytest.mark.parametrize(("inverse_step", "sigma_sum", "n_clients"), [(0.0, 1.0, 3), (1.0, -1.0, 3), (1.0, 1.0, 0)])
def test_numbers_that_cannot_be_are_refused(inverse_step: float, sigma_sum: float, n_clients: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        noisy_bits(plan(), inverse_step=inverse_step, sigma_sum=sigma_sum, n_clients=n_clients)
