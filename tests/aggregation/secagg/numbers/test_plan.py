"""What a secure round says of its numbers, and how it follows from the round before."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests.aggregation.secagg.house import (
    N_VALUES,
    cohort,
    composed,
    error,
    gaussian,
    mean_of,
    secure_plan,
    vector_layout,
    weighted_mean,
    work_of,
)
from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.codec.step import ALARM_SHARE, bits_for
from umbel.aggregation.plans.codec import Codec, CodecPlan
from umbel.aggregation.plans.masks import NoisePlan, SecurePlan, SumShown
from umbel.aggregation.plans.round import RoundPlan, Weighting
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.numbers.plan import FIRST_RMS, secure_plan_after
from umbel.aggregation.secagg.section import SecureAggregationSection
from umbel.aggregation.types import LEVEL_MAX, RunId

CODEC = CodecSection("integer", step=0.5)
SECTION = SecureAggregationSection(expected_sample_count=100)

NOISE = NoisePlan(100.0, 10_000, 4096, 3)


def round_plan(number: int, n_clients: int) -> RoundPlan:
    return RoundPlan(RunId("run"), number, 1, n_clients, 3, 1.0, 60.0, Weighting.SAMPLES, 1 << 20, 64.0, 0)


def first_composition(n_clients: int, codec: CodecSection = CODEC) -> Composition:
    plan = round_plan(1, n_clients)
    return Composition(*SECTION.first(codec, plan, N_VALUES, 5), plan.grid, 1 << 20, vector_layout())


def next_composition(before: Composition, number: int, n_clients: int, shown: SumShown) -> Composition:
    plan = round_plan(number, n_clients)
    codec, secure = SECTION.after(CODEC, (before.codec, before.secure), plan, shown, number)
    return replace(before, codec=codec, secure=secure, grid=plan.grid)


def test_a_plan_survives_json() -> None:
    plan = SecurePlan(9, 128, 12, 5, True, ("loss",), ("loss", "a.b/c"))
    adapter = TypeAdapter(SecurePlan)
    assert adapter.validate_json(adapter.dump_json(plan)) == plan


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bits": 33}, "bits must lie between 1 and 32, not 33; take a larger step"),
        ({"bits": 0}, "bits"),
        ({"weight_unit": 0}, "weight_unit"),
        ({"minimum": 2}, "at least 3, .* at most 65536; they are 2 and 12"),
        ({"minimum": 13}, "they are 13 and 12"),
        ({"clients_max": 65_537}, "65536"),
        ({"metrics": ("loss", "loss")}, "each of them once"),
        ({"evaluation": ("lo ss",)}, "metric name 'lo ss'"),
        ({"metrics": tuple(map(str, range(65)))}, "at most 64"),
        ({"noise": NOISE, "metrics": ("loss",)}, "must have noise"),
        ({"noise": NOISE, "is_proportional": True}, "must have noise"),
    ],
)
def test_a_plan_that_no_round_could_have_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(SecurePlan(9, 128, 12), **changes)  # type: ignore[arg-type]


@given(st.integers(3, 65_536))
def test_the_unwrapping_bits_hold_every_sum_and_one_less_does_not(n_clients: int) -> None:
    bits = SecurePlan(1, 1, n_clients).unwrapping().bits
    assert n_clients * LEVEL_MAX < 1 << (bits - 1)
    assert n_clients * LEVEL_MAX >= 1 << (bits - 2)


def test_the_bits_of_a_private_round_hold_its_bounded_norms_and_stay() -> None:
    private = SecurePlan(11, 1, 100, noise=NOISE)
    assert private.unwrapping() == private


def test_the_first_round_is_fine_and_cannot_wrap() -> None:
    plan = round_plan(1, 12)
    for step in (2.0**-8, 0.5, 16.0):  # whatever the run file's step is, it counts from the second round on
        codec, secure = SECTION.first(replace(CODEC, step=step, first_norm=3.0), plan, 10_000, 7)
        assert 1 / codec.inverse_step == pytest.approx(3.0 / math.sqrt(10_000) / FIRST_RMS)
        assert (codec.codec, codec.key, secure.bits, secure.weight_unit) == (Codec.INTEGER, 7, 20, 100)


SHOWN = SumShown(n_clients=10, update_rms=2.0, spread=8.0, share_near_the_edge=0.0)


def codec_at(step: float) -> CodecPlan:
    return CodecPlan(Codec.INTEGER, 1.0).at_step(step)


@pytest.mark.parametrize(
    ("n_clients", "sigma"),
    [
        (10, 1.5 * 8),
        (20, 1.5 * 8 * 2),  # more clients: as if they were all the same
        (5, 1.5 * 8 * math.sqrt(0.5)),  # fewer: as if they had nothing in common
        (1000, 1.5 * 8 * 100),
    ],
)
def test_the_bits_hold_half_as_much_again_as_the_sum_has_shown(n_clients: int, sigma: float) -> None:
    after = secure_plan_after(SecurePlan(9, 1, 10), codec_at(1.0), SHOWN, clients_max=n_clients, minimum=3)
    assert after.bits == bits_for(inverse_step=1.0, sigma_sum=sigma, n_clients=n_clients)
    assert (after.clients_max, after.minimum) == (n_clients, 3)


def test_updates_that_cancelled_are_not_expected_to_do_so_again() -> None:
    shown = replace(SHOWN, spread=0.0, update_rms=20.0)
    after = secure_plan_after(SecurePlan(9, 1, 10), codec_at(1.0), shown, clients_max=10, minimum=3)
    assert after.bits == bits_for(inverse_step=1.0, sigma_sum=20 * math.sqrt(10), n_clients=10)


def test_an_alarm_takes_one_bit_more_and_nothing_takes_more_than_any_sum_needs() -> None:
    plan, codec = SecurePlan(9, 1, 10), codec_at(1.0)
    calm = secure_plan_after(plan, codec, SHOWN, clients_max=10, minimum=3)
    alarmed = secure_plan_after(
        plan, codec, replace(SHOWN, share_near_the_edge=2 * ALARM_SHARE), clients_max=10, minimum=3
    )
    assert alarmed.bits == calm.bits + 1
    vast = secure_plan_after(
        plan, codec, replace(SHOWN, spread=1e30, share_near_the_edge=1.0), clients_max=10, minimum=3
    )
    assert vast == plan.unwrapping()


def test_a_round_in_which_nothing_changed_says_nothing_of_the_next() -> None:
    before = first_composition(5)
    after = next_composition(before, 2, 5, SumShown(5, 0.0, 0.0, 0.0))
    assert after.codec.inverse_step == before.codec.inverse_step
    assert after.secure == before.secure


@pytest.mark.parametrize(
    "shown", [(0, 1.0, 1.0, 0.0), (3, -1.0, 1.0, 0.0), (3, 1.0, math.inf, 0.0), (3, 1.0, 1.0, 2.0)]
)
def test_what_no_sum_shows_is_refused(shown: tuple[int, float, float, float]) -> None:
    with pytest.raises(ValueError, match=r"must|has 1 to"):
        SumShown(*shown)


# --- from round to round ----------------------------------------------------------------------------------------------


def changes_of(n_clients: int, seed: int, norm: float) -> list[torch.Tensor]:
    """Half of each client's energy is everybody's."""
    shared = gaussian(N_VALUES, 1000 * seed)
    return [
        (shared + gaussian(N_VALUES, 1000 * seed + 1 + rank)) * (norm / math.sqrt(2 * N_VALUES))
        for rank in range(n_clients)
    ]


@pytest.mark.parametrize("growth", [0.4, 1.0, 1.5], ids=["shrinking", "steady", "growing"])
def test_five_rounds_stay_unwrapped_and_take_few_bits_from_the_second_on(growth: float) -> None:
    n_clients, composition, made = 9, first_composition(9), None
    weights = [30, 50, 80, 100, 110, 150, 200, 320, 600]
    used: list[int] = []
    for number in range(1, 6):
        changes = changes_of(n_clients, number, 0.2 * growth**number)
        here = cohort(composition, changes, [work_of(weight) for weight in weights])
        assert not here.has_wrapped
        made = here.totals()
        assert error(mean_of(made, N_VALUES), weighted_mean(changes, weights)) < 0.06
        assert made.shown.share_near_the_edge < ALARM_SHARE
        used.append(composition.secure.bits)
        composition = next_composition(composition, number + 1, n_clients, made.shown)
    assert made is not None
    rms, step = made.shown.update_rms, 1 / composition.codec.inverse_step
    assert step == pytest.approx(0.5 * rms)
    # The sum of nine, half of whose energy is shared, stands at about twelve steps of half a root mean square each.
    assert used[0] == 20
    assert all(bits <= 9 for bits in used[1:]), used
    assert max(abs(a - b) for a, b in pairwise(used[1:])) <= 1


# Levels of a client's expected update have the root mean square 64, and an update is shortened to 6,553. So at 300
# times the expected one the first mean is too short, and the second sum may wrap: its retry does not.
@pytest.mark.parametrize(
    ("weight_off", "norm_off", "error_max"),
    [(1.0, 1.0, 1e-4), (0.01, 1.0, 0.04), (30.0, 1.0, 1e-4), (1.0, 10.0, 1e-4), (1.0, 0.1, 1e-3), (30.0, 10.0, 0.7)],
)
def test_the_first_rounds_guesses_may_be_far_off(weight_off: float, norm_off: float, error_max: float) -> None:
    """Of the mean's energy. It neither wraps nor is lost; the second round is at the step that was asked for."""
    n_clients, composition = 12, first_composition(12)
    weights = [max(1, round(100 * weight_off * (1 + rank / 12))) for rank in range(n_clients)]
    changes = changes_of(n_clients, 3, norm_off)
    here = cohort(composition, changes, [work_of(weight) for weight in weights])
    assert not here.has_wrapped
    made = here.totals()
    assert error(mean_of(made, N_VALUES), weighted_mean(changes, weights)) < error_max
    after = next_composition(composition, 2, n_clients, made.shown)
    grown = 0.5 * made.shown.update_rms * after.codec.inverse_step
    assert grown == pytest.approx(1.0) or (weight_off * norm_off > 4 and grown > 1)  # fourfold at most
    second = cohort(after, changes, [work_of(weight) for weight in weights])
    if weight_off * norm_off > 100:
        after = replace(after, secure=after.secure.unwrapping())
        second = cohort(after, changes, [work_of(weight) for weight in weights])
    assert not second.has_wrapped


def test_after_the_first_round_the_step_is_that_of_the_run_file_times_four_at_most() -> None:
    before = first_composition(5)
    usual = 1 / math.sqrt(N_VALUES)
    for rms, step in ((usual, 0.5 * usual), (7 * usual, 3.5 * usual / 1.75), (0.01 * usual, 0.005 * usual)):
        after = next_composition(before, 2, 5, SumShown(5, rms, rms, 0.0))
        assert 1 / after.codec.inverse_step == pytest.approx(min(step, 4 * 0.5 * usual))
        third = next_composition(after, 3, 5, SumShown(5, 1e6 * rms, rms, 0.0))
        assert third.codec.inverse_step == pytest.approx(after.codec.inverse_step / 4)


def test_a_round_asks_more_clients_than_the_one_before() -> None:
    composition = composed(secure_plan(5))
    made = cohort(composition, changes_of(5, 1, 1.0), [work_of(1)] * 5).totals()
    after = next_composition(composition, 2, 50, made.shown)
    here = cohort(after, changes_of(50, 2, 1.0), [work_of(1)] * 50)
    assert not here.has_wrapped
