"""How much of its work a client must have done: where it is bound, and that nothing is made of less."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.aggregation.secagg.house import N_VALUES, composed, secure_plan, sent
from umbel.aggregation.canonical import canonical
from umbel.aggregation.plans.masks import NoisePlan, SecurePlan
from umbel.aggregation.secagg.numbers.contribution import Contribution, LocalWork, TooLittleWork, contribution
from umbel.aggregation.secagg.numbers.plan import require_floor, steps_needed, usual_floor

NOISE = NoisePlan(100.0, 10_000, 4096, 3)


@pytest.mark.parametrize(
    ("floor", "planned", "needed"),
    [
        (1.0, 1, 1),
        (1.0, 1500, 1500),
        (1.0, 1 << 62, 1 << 62),
        (0.5, 1, 1),
        (0.5, 3, 2),
        (0.5, 4, 2),
        (0.1, 30, 3),
        (0.3, 10, 3),
        (2 / 3, 3, 2),
        (0.0, 1500, 1),
    ],
)
def test_how_many_steps_a_floor_is(floor: float, planned: int, needed: int) -> None:
    assert steps_needed(floor, planned) == needed


@given(st.floats(0, 1), st.integers(1, 1 << 40))
def test_a_floor_is_never_more_than_all_and_one_step_at_least(floor: float, planned: int) -> None:
    assert 1 <= steps_needed(floor, planned) <= planned


def test_without_noise_all_of_the_work_is_asked_and_with_it_one_step() -> None:
    assert (usual_floor(has_noise=False), usual_floor(has_noise=True)) == (1.0, 0.0)
    assert SecurePlan(9, 1, 5).minimum_work == 1.0, "a plan that says nothing of it asks for all"


@pytest.mark.parametrize("share", [0.0, 9.9e-7, -0.5, 1.000001, float("nan"), float("inf")])
def test_a_floor_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="minimum_work must lie between 1e-06 and 1"):
        require_floor(share, "minimum_work")


@pytest.mark.parametrize("share", [1e-6, 0.5, 1.0])
def test_a_share_above_nothing_and_up_to_all_is_one(share: float) -> None:
    require_floor(share, "minimum_work")


@pytest.mark.parametrize("share", [-1e-9, 1.000001, float("nan")])
def test_a_plan_refuses_what_is_no_share(share: float) -> None:
    with pytest.raises(ValueError, match="minimum_work, a share of the steps, must lie between 0 and 1"):
        SecurePlan(9, 1, 5, minimum_work=share)


def test_the_floor_is_in_what_all_clients_sign() -> None:
    assert '"minimum_work":1' in canonical(SecurePlan(9, 1, 5))
    assert canonical(SecurePlan(9, 1, 5)) != canonical(SecurePlan(9, 1, 5, minimum_work=0.5))


EDGES = [(1.0, 4, True), (1.0, 3, False), (0.5, 2, True), (0.5, 1, False)]


@pytest.mark.parametrize(("floor", "done", "is_enough"), EDGES)
def test_nothing_is_made_of_less_work(floor: float, done: int, is_enough: bool) -> None:
    composition = composed(secure_plan(5, minimum_work=floor))
    work = LocalWork(10, done, 4)
    if is_enough:
        assert sent(composition, torch.ones(N_VALUES), work, 0).words[4] == done
        return
    with pytest.raises(TooLittleWork) as refusal:
        sent(composition, torch.ones(N_VALUES), work, 0)
    assert not any(character.isdigit() for character in str(refusal.value)), "no number of it"


@pytest.mark.parametrize(("floor", "done", "is_enough"), [*EDGES, (0.0, 1, True)])
def test_in_a_private_round_too_though_its_words_say_nothing_of_the_work(
    floor: float, done: int, is_enough: bool
) -> None:
    secure = replace(secure_plan(5, minimum_work=floor), noise=NOISE)
    composition, change = composed(secure), torch.ones(N_VALUES)

    def made() -> Contribution:
        return contribution(composition, lambda: iter([change]), LocalWork(10, done, 4), bytes(32))

    if is_enough:
        assert made().words[4] == 1
        return
    with pytest.raises(TooLittleWork):
        made()
