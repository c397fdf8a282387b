"""FedProx's mu adapts as its paper says, and whoever knows the losses comes to the same mu."""

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.plans.proximal import MuRule, MuState
from umbel.aggregation.types import RATE_MAX

LOSSES = st.lists(st.floats(0.0, 4.0, width=16), max_size=20)
STEP = 0.1


def by_the_paper(first: float, losses: Sequence[float]) -> list[float]:
    """The mu of each round and of the one after the last, in float64: Li et al. 2020, section 5.3."""
    found, n_falls = [first] * min(len(losses) + 1, 2), 0
    for before, now in pairwise(losses):
        mu, n_falls = found[-1], n_falls + 1 if now < before else 0
        if now > before:
            mu += 0.1
        elif n_falls == 5:
            mu, n_falls = max(mu - 0.1, 0.0), 0
        found.append(mu)
    return found


def states(rule: MuRule, losses: Sequence[float | None]) -> list[MuState]:
    found = [rule.first]
    for loss in losses:
        found.append(rule.after(found[-1], loss))
    return found


def mus(rule: MuRule, losses: Sequence[float | None]) -> list[float]:
    return [one.proximal_mu for one in states(rule, losses)]


def test_twenty_rounds_are_as_the_paper_says() -> None:
    losses = [2.0, 1.5, 1.6, 1.7, 1.4, 1.3, 1.2, 1.1, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.4, 0.3, 0.5, 0.6, 0.2]
    expected = [1.0, 1.0, 1.0, 1.1, 1.2, 1.2, 1.2, 1.2, 1.2, 1.1, 1.1, 1.1, 1.1, 1.1, 1.0, 1.0, 1.0, 1.0, 1.1, 1.2, 1.2]
    assert mus(MuRule(1.0, STEP), losses) == expected
    assert by_the_paper(1.0, losses) == pytest.approx(expected, abs=1e-9)


@given(st.sampled_from([0.0, 0.05, 1.0]), LOSSES)
def test_any_losses_lead_to_the_papers_mu(first: float, losses: list[float]) -> None:
    assert mus(MuRule(first, STEP), losses) == pytest.approx(by_the_paper(first, losses), abs=1e-9)


def test_mu_never_falls_below_zero_and_rises_from_there() -> None:
    falling = [1.0 - 0.01 * number for number in range(13)]
    assert mus(MuRule(0.15, STEP), [*falling, 2.0]) == [0.15] * 6 + [0.05] * 5 + [0.0] * 3 + [0.1]


@given(LOSSES, st.integers(0, 20))
def test_a_round_without_a_loss_changes_nothing(losses: list[float], place: int) -> None:
    rule = MuRule(0.0, STEP)
    assert states(rule, [*losses[:place], None, *losses[place:]])[-1] == states(rule, losses)[-1]


def test_the_last_bits_of_a_mean_are_no_rise() -> None:
    """They depend on the order of the reports."""
    rule, loss = MuRule(0.0, STEP), 0.3
    assert math.nextafter(loss, 1.0) > loss
    assert states(rule, [loss, math.nextafter(loss, 1.0)]) == states(rule, [loss, loss])
    assert mus(rule, [loss, loss * (1 + 1e-8)])[-1] == STEP


@given(st.sampled_from([0.0, 0.25, 2.0]), LOSSES)
def test_a_client_takes_every_mu_that_losses_can_lead_to(first: float, losses: list[float]) -> None:
    rule = MuRule(first, STEP)
    assert all(rule.allows(mu, n_before) for n_before, mu in enumerate(mus(rule, losses)))


@pytest.mark.parametrize(
    ("n_before", "least", "most"), [(0, 1.0, 1.0), (1, 1.0, 1.0), (2, 1.0, 1.1), (6, 0.9, 1.5), (60, 0.0, 6.9)]
)
def test_a_client_takes_no_mu_that_no_losses_lead_to(n_before: int, least: float, most: float) -> None:
    rule = MuRule(1.0, STEP)
    assert [rule.allows(mu, n_before) for mu in (least, most)] == [True, True]
    assert [rule.allows(mu, n_before) for mu in (least - 1e-6, most + 1e-6, math.nan)] == [False] * 3


def test_the_copy_of_a_version_comes_with_its_mu() -> None:
    rule = MuRule(0.0, STEP)
    made = [(None, None), (None, 1.0), (None, 2.0), (None, 1.5)]  # versions 0 to 3
    found = rule.after_versions([*made, (1, None), (None, 0.5), (0, None)])
    assert found[:4] == states(rule, [1.0, 2.0, 1.5])
    assert found[4] == found[1]
    assert found[5] == rule.after(found[1], 0.5), "it is compared with the loss before version 1 was left"
    assert found[6] == rule.first


def test_mu_stays_within_what_a_run_file_may_say() -> None:
    rule = MuRule(RATE_MAX, STEP)
    assert mus(rule, [1.0, 2.0])[-1] == RATE_MAX
    assert rule.allows(RATE_MAX, 2)


def test_mu_stays_below_the_run_files_bound() -> None:
    rule = MuRule(0.0, STEP, most=0.25)
    assert mus(rule, [1.0, 2.0, 3.0, 4.0, 5.0]) == [0.0, 0.0, 0.1, 0.2, 0.25, 0.25]
    assert rule.allows(0.25, 9)
    assert not rule.allows(0.3, 9)
    with pytest.raises(ValueError, match="proximal_mu must lie"):
        MuRule(0.3, STEP, most=0.25)


@pytest.mark.parametrize("wrong", [{"proximal_mu": -0.1}, {"proximal_mu": math.nan}, {"loss": math.inf}, {"falls": 5}])
def test_a_state_that_no_rounds_lead_to_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must lie"):
        MuState(**{"proximal_mu": 0.0, **wrong})  # type: ignore[arg-type]  # of both kinds
