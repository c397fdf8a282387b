"""The accountant: above the divergence itself, at the Gaussian's where noise is large, and within every budget."""

import builtins
import math
import sys
from typing import Any

import mpmath
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.aggregation.privacy.accounting import (
    ORDERS,
    AccountantMissing,
    Allowance,
    Ledger,
    PublishedSum,
    allowance,
    epsilon_of,
)
from umbel.aggregation.privacy.sensitivity import l1_bound

DELTA = 1e-6


def divergence(variance: float, shift: int, order: int) -> float:
    """Of Skellam noise and the same shifted by an integer, by its definition, with thirty digits."""
    with mpmath.workdps(30):
        top = int(30 * math.sqrt(variance)) + 40 + shift * (2 + order)
        p = [mpmath.besseli(k, mpmath.mpf(variance)) for k in range(top + shift + 1)]
        whole = p[0] + 2 * mpmath.fsum(p[1:])
        terms = (p[abs(k - shift)] ** order * p[abs(k)] ** (1 - order) for k in range(-top, top + 1))
        return float(mpmath.log(mpmath.fsum(terms) / whole) / (order - 1))


def gaussian_epsilon(noise_multiplier: float, rounds: int) -> float:
    accountant = RdpAccountant(ORDERS)
    accountant.compose(GaussianDpEvent(noise_multiplier), rounds)
    return float(accountant.get_epsilon(DELTA))


def charged(variance: float, shift: int, order: int) -> float:
    """What one integer that changes by `shift` is charged."""
    return float(PublishedSum(variance, shift * shift, 1).divergences([order])[0])


@pytest.mark.parametrize("variance", [0.5, 4.0, 60.0])
@pytest.mark.parametrize("shift", [1, 2, 6])
@pytest.mark.parametrize("order", [2, 3, 10])
def test_a_release_is_charged_at_least_what_it_costs(variance: float, shift: int, order: int) -> None:
    exact = divergence(variance, shift, order)
    assert exact <= charged(variance, shift, order)
    if variance == 60.0 and order < 10:
        assert charged(variance, shift, order) < 1.1 * exact


def test_several_coordinates_are_charged_at_least_what_each_costs() -> None:
    """Divergences of independent coordinates add up: 4, 1, 1, 1 have squares of 19 and magnitudes of 7."""
    release, order = PublishedSum(3.0, 19, 4), 4
    exact = divergence(3.0, 4, order) + 3 * divergence(3.0, 1, order)
    assert l1_bound(19, 4) >= 7
    assert exact <= float(release.divergences([order])[0])


def test_the_charge_is_the_published_one() -> None:
    """Agarwal, Kairouz and Liu (2021), by hand: D2^2 = 4, D1 = 4, for either side of the minimum."""
    assert PublishedSum(10.0, 4, 100).divergences([2]).tolist() == [8 / 20 + (3 * 4 + 24) / 400]
    assert PublishedSum(0.5, 4, 100).divergences([2]).tolist() == [8 / 1 + 12 / 1.0]


@pytest.mark.parametrize("noise_multiplier", [0.5, 1.0, 8.0])
@pytest.mark.parametrize("rounds", [1, 50])
def test_with_much_noise_it_is_the_gaussian(noise_multiplier: float, rounds: int) -> None:
    bound = 10**8
    release = PublishedSum(noise_multiplier**2 * bound, bound, 10**6)
    ledger = Ledger(DELTA).after(release, rounds)
    gaussian = gaussian_epsilon(noise_multiplier, rounds)
    assert gaussian <= ledger.epsilon <= gaussian * (1 + 1e-4)
    assert ledger.n_rounds == rounds


@given(st.floats(0.3, 1e6), st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 300))
@settings(max_examples=50, deadline=None)
def test_more_noise_costs_less_and_more_of_anything_else_costs_more(
    variance: float, bound: int, n_values: int, rounds: int
) -> None:
    def epsilon(variance: float, bound: int, n_values: int, rounds: int) -> float:
        return Ledger(DELTA).after(PublishedSum(variance, bound, n_values), rounds).epsilon

    here = epsilon(variance, bound, n_values, rounds)
    assert epsilon(2 * variance, bound, n_values, rounds) <= here
    assert here <= epsilon(variance, 2 * bound, n_values, rounds)
    assert here <= epsilon(variance, bound, 2 * n_values, rounds)
    assert here <= epsilon(variance, bound, n_values, rounds + 1)


def test_rounds_one_by_one_are_rounds_at_once() -> None:
    one, other, ledger = PublishedSum(50.0, 40, 9), PublishedSum(80.0, 40, 9), Ledger(DELTA)
    for _ in range(3):
        ledger = ledger.after(one).after(other)
    at_once = Ledger(DELTA).after(other, 3).after(one, 3)
    assert ledger.n_rounds == at_once.n_rounds == 6
    assert ledger.epsilon == pytest.approx(at_once.epsilon, rel=1e-12)


def test_nothing_costs_nothing() -> None:
    assert Ledger(DELTA).epsilon == 0.0
    assert Ledger(DELTA).epsilon_within(1.0) == 0.0


@pytest.mark.parametrize(("epsilon", "rounds"), [(0.1, 1000), (1.0, 1), (1.0, 100), (8.0, 20), (50.0, 7)])
@pytest.mark.parametrize(("bound", "n_values"), [(1, 1), (30, 10), (10**6, 10**6)])
def test_a_budget_is_kept_for_its_rounds_and_no_longer(epsilon: float, rounds: int, bound: int, n_values: int) -> None:
    allowed = allowance(epsilon, DELTA, rounds)
    release = PublishedSum(allowed.variance(bound, n_values), bound, n_values)
    assert float(release.divergences([allowed.order])[0]) <= allowed.divergence
    assert Ledger(DELTA).after(release, rounds).epsilon <= epsilon
    spent = epsilon_of([rounds * allowed.divergence], DELTA, [allowed.order])
    assert 0.999 * epsilon < spent <= epsilon
    if bound == 10**6:
        assert epsilon < Ledger(DELTA).after(release, rounds + 2).epsilon


@pytest.mark.parametrize(("bound", "n_values"), [(1, 1), (30, 10), (10**6, 10**6)])
@pytest.mark.parametrize("budget", [0.1, 1.0, 8.0, 50.0])
def test_a_site_with_a_budget_as_large_or_larger_admits_all_of_its_rounds(
    budget: float, bound: int, n_values: int
) -> None:
    """What it counts is no less than the best order says, and at its own order a planned run fits."""
    allowed = allowance(budget, DELTA, 20)
    ledger = Ledger(DELTA).after(PublishedSum(allowed.variance(bound, n_values), bound, n_values), 20)
    for more in (1.0, 1.01, 1.5, 4.0):
        assert ledger.epsilon <= ledger.epsilon_within(more * budget) <= more * budget
    if bound == 10**6:
        assert (
            ledger.after(PublishedSum(allowed.variance(bound, n_values), bound, n_values), 1).epsilon_within(budget)
            > budget
        )


def test_a_budget_is_held_at_its_own_order() -> None:
    """One that is cheap at another order only is not within it."""
    ledger = Ledger(DELTA, 1, tuple(0.0 if order == 40 else 50.0 for order in ORDERS))
    assert ledger.epsilon < 2.0 < 50.0 < ledger.epsilon_within(2.0)


def test_a_budget_is_kept_by_rounds_of_different_steps() -> None:
    """What each costs at the one order is fixed, whatever bound its step gives."""
    allowed, ledger = allowance(2.0, DELTA, 6), Ledger(DELTA)
    for bound in (3, 10**6, 50, 10**4, 7, 10**5):
        ledger = ledger.after(PublishedSum(allowed.variance(bound, 10**6), bound, 10**6))
    assert 1.9 < ledger.epsilon <= 2.0


@pytest.mark.parametrize("bound", [1, 50, 10**5])
@pytest.mark.parametrize("cost", [1e-5, 0.1, 30.0])
def test_the_noise_for_an_allowance_is_the_least(cost: float, bound: int) -> None:
    allowed = Allowance(4, cost)
    variance = allowed.variance(bound, 1000)
    assert float(PublishedSum(variance, bound, 1000).divergences([4])[0]) <= cost
    assert float(PublishedSum(variance * (1 - 1e-6), bound, 1000).divergences([4])[0]) > cost


def test_it_takes_the_noise_multiplier_that_the_gaussian_takes() -> None:
    z = allowance(1.0, DELTA, 100).noise_multiplier
    assert gaussian_epsilon(z, 100) == pytest.approx(1.0, rel=1e-6)


def test_orders_are_whole() -> None:
    """The bound is proved for no others."""
    assert ORDERS[0] == 2
    assert list(ORDERS) == sorted(set(ORDERS))


@pytest.mark.parametrize(("variance", "bound", "n"), [(0.0, 1, 1), (math.inf, 1, 1), (math.nan, 1, 1), (1.0, 0, 1)])
def test_a_sum_that_cannot_be_is_refused(variance: float, bound: int, n: int) -> None:
    with pytest.raises(ValueError, match="finite variance"):
        PublishedSum(variance, bound, n)


def test_a_budget_that_no_noise_keeps_to_is_refused() -> None:
    with pytest.raises(ValueError, match="no amount of noise keeps"):
        allowance(1e-6, 1e-12, 1)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, math.nan])
def test_a_delta_that_is_no_probability_is_refused(delta: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        epsilon_of([0.0] * len(ORDERS), delta)


def test_without_the_library_it_says_which_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("dp_accounting"):
            raise ModuleNotFoundError(f"No module named {name!r}", name="dp_accounting")
        return real(name, *rest, **more)

    for name in [one for one in sys.modules if one.startswith("dp_accounting")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(AccountantMissing, match=r"\.\[privacy\]"):
        _ = Ledger(DELTA).epsilon
