"""q-FedAvg's parts: what a client multiplies by, what the mean is multiplied by, and what a false claim can do."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.algorithms.qfedavg import (
    TERM_RATIO_MAX,
    FairReport,
    FairTerms,
    loss_weight,
    step_factor,
    weighed,
)

TERMS = FairTerms(2.0, 4.0, 10.0)
LOSSES = st.floats(0.01, 4.0)
REPORTS = st.lists(st.builds(FairReport, st.integers(1, 1 << 20), LOSSES, st.floats(0.5, 2.0)), min_size=1, max_size=40)


@given(REPORTS, st.floats(0.0, 5.0))
def test_the_step_is_that_of_the_papers_formula(reports: list[FairReport], q: float) -> None:
    """With changes of one number each. Losses and norms are alike enough that no bound on them counts."""
    terms = replace(TERMS, q=q)
    sent = [loss_weight(one.loss, terms) * one.norm for one in reports]
    mean = sum(one.weight * u for one, u in zip(reports, sent, strict=True)) / sum(one.weight for one in reports)
    ratios = sorted(terms.q * terms.lipschitz * one.norm**2 / one.loss for one in reports)
    if ratios[-1] > TERM_RATIO_MAX * ratios[(len(ratios) - 1) // 2]:
        return
    up = sum(one.weight * one.loss**q * terms.lipschitz * one.norm for one in reports)
    down = sum(
        one.weight * (q * one.loss ** (q - 1) * (terms.lipschitz * one.norm) ** 2 + terms.lipschitz * one.loss**q)
        for one in reports
    )
    assert step_factor(reports, terms) * mean == pytest.approx(up / down, rel=1e-6)


@given(REPORTS, st.data())
def test_the_order_of_clients_has_no_effect(reports: list[FairReport], data: st.DataObject) -> None:
    assert step_factor(data.draw(st.permutations(reports)), TERMS) == step_factor(reports, TERMS)


@given(REPORTS)
def test_with_q_zero_the_step_is_the_mean(reports: list[FairReport]) -> None:
    fedavg = replace(TERMS, q=0.0)
    assert [loss_weight(one.loss, fedavg) for one in reports] == [1.0] * len(reports)
    assert step_factor(reports, fedavg) == 1.0


def test_a_loss_beyond_the_greatest_counts_as_the_greatest_and_none_as_very_little() -> None:
    assert loss_weight(1e30, TERMS) == loss_weight(4.0, TERMS) == 1.0
    assert 0 < loss_weight(0.0, TERMS) < 1e-20
    assert loss_weight(2.0, TERMS) == 0.25
    assert loss_weight(0.0, replace(TERMS, q=16.0)) == 2.0**-100


def test_a_made_up_norm_slows_the_step_and_cannot_stop_it() -> None:
    honest = [FairReport(100, 1.0, 1.0)] * 9
    step = step_factor([*honest, FairReport(100, 1.0, 1.0)], TERMS)
    slowed = step_factor([*honest, FairReport(100, 1.0, 1e30)], TERMS)
    assert slowed == step_factor([*honest, FairReport(100, 1.0, 1e6)], TERMS)
    assert step / (1 + TERM_RATIO_MAX / 10) < slowed < step


def test_two_of_four_that_deny_their_norm_do_not_take_those_of_the_others_out() -> None:
    honest, denied = FairReport(100, 1.0, 3.0), FairReport(100, 1.0, 0.0)
    weight, ratio = loss_weight(1.0, TERMS), TERMS.q * TERMS.lipschitz * 9.0
    found = step_factor([honest, honest, denied, denied], TERMS)
    assert found == pytest.approx(4 / (weight * (2 * (1 + ratio) + 2)))


def test_a_change_is_multiplied_and_rounded_once() -> None:
    change, weight = torch.randn(1000, generator=torch.Generator().manual_seed(3)), loss_weight(0.7, TERMS)
    assert torch.equal(weighed(change, weight), (change.double() * weight).float())
