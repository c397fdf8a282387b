"""Errors of a round's mean change, against all rounds that can be, with their chances."""

import math
from itertools import combinations, product

import numpy as np
import pytest
import torch

from umbel.aggregation.plans.round import Weighting
from umbel.sim.bench.sampling.errors import (
    ClientChanges,
    Floats,
    drawn_weights,
    errors_of,
    proportional_error,
    samples_in_round,
    scheme_two,
)

SIZES = np.array([1, 2, 5, 12])
X = np.array([[1.0, 0.0, 2.0], [0.0, -1.0, 1.0], [3.0, 1.0, 0.0], [-1.0, 2.0, 1.0]])
CHANGES = ClientChanges.of(SIZES, torch.from_numpy(X).float())
P = SIZES / SIZES.sum()
TRUTH = P @ X
LENGTH = float(np.linalg.norm(TRUTH))


def uniform_pairs() -> Floats:
    """The weights of every uniform cohort of two; all are equally likely."""
    rows = np.zeros((6, 4))
    for row, pair in zip(rows, combinations(range(4), 2), strict=True):
        row[list(pair)] = SIZES[list(pair)] / SIZES[list(pair)].sum()
    return rows


def of_enumerated(weights: Floats, chances: Floats) -> tuple[float, float, float]:
    """Bias, deviation and error of weights with these chances, divided by |X|."""
    means = weights @ X
    expected = chances @ means
    deviation = math.sqrt(chances @ ((means - expected) ** 2).sum(1))
    error = math.sqrt(chances @ ((means - TRUTH) ** 2).sum(1))
    return float(np.linalg.norm(expected - TRUTH)) / LENGTH, deviation / LENGTH, error / LENGTH


def test_the_length_is_that_of_the_mean_change_weighted_by_samples() -> None:
    assert CHANGES.length == pytest.approx(LENGTH)
    assert CHANGES.shares == pytest.approx(P)


def test_errors_are_those_of_all_cohorts_together() -> None:
    bias, deviation, error = of_enumerated(uniform_pairs(), np.full(6, 1 / 6))
    found = errors_of(np.tile(uniform_pairs(), (2000, 1)), CHANGES)
    assert bias > 0.1
    assert (found.bias, found.deviation, found.error) == pytest.approx((bias, deviation, error), rel=1e-3)


def test_a_bias_that_is_only_luck_is_taken_out() -> None:
    """Few proportional draws, which have none: their mean is off by luck alone, and the correction says so."""
    found = [errors_of(drawn_weights(Weighting.PROPORTIONAL, SIZES, 2, 30, seed), CHANGES) for seed in range(40)]
    assert sum(one.bias == 0 for one in found) > 15
    assert all(one.bias < one.deviation for one in found)


@pytest.mark.parametrize("n_draws", [1, 2, 3])
def test_the_error_of_proportional_draws_is_that_of_all_sequences_of_draws(n_draws: int) -> None:
    draws = list(product(range(4), repeat=n_draws))
    weights = np.array([np.bincount(one, minlength=4) / n_draws for one in draws])
    bias, _, error = of_enumerated(weights, np.array([math.prod(P[list(one)]) for one in draws]))
    assert bias == pytest.approx(0.0, abs=1e-12)
    assert proportional_error(CHANGES, n_draws) == pytest.approx(error)


@pytest.mark.parametrize("weighting", list(Weighting))
def test_the_samples_of_a_cohort_are_those_of_its_clients_each_counted_once(weighting: Weighting) -> None:
    weights = drawn_weights(weighting, SIZES, 3, 3000, 1)
    assert ((weights > 0) @ SIZES).mean() == pytest.approx(samples_in_round(weighting, SIZES, 3), rel=0.02)


def test_drawn_rounds_have_the_errors_of_the_enumerated_ones() -> None:
    """With the coordinator's draws. The seed is fixed, so the test is."""
    uniform = errors_of(drawn_weights(Weighting.SAMPLES, SIZES, 2, 3000, 1), CHANGES)
    bias, deviation, _ = of_enumerated(uniform_pairs(), np.full(6, 1 / 6))
    assert (uniform.bias, uniform.deviation) == pytest.approx((bias, deviation), rel=0.1)
    proportional = errors_of(drawn_weights(Weighting.PROPORTIONAL, SIZES, 2, 3000, 1), CHANGES)
    assert proportional.error == pytest.approx(proportional_error(CHANGES, 2), rel=0.05)


def test_scheme_two_has_no_bias_but_weights_that_need_not_sum_to_one() -> None:
    weights = scheme_two(uniform_pairs(), SIZES)
    assert weights.mean(0) == pytest.approx(P)
    assert weights.sum(1).min() < 0.5
    assert weights.sum(1).max() > 1.5
