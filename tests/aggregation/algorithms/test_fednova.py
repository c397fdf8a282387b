"""FedNova's parts: what a client divides by, and what the mean is multiplied by."""

from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.algorithms.fednova import COUNTED_STEPS_MAX, effective_steps, normalised, weighted_steps

CLIENTS = st.lists(st.tuples(st.integers(1, 1 << 20), st.integers(1, 1 << 30)), min_size=1, max_size=50)


@given(CLIENTS)
def test_effective_steps_are_the_weighted_mean_of_the_steps(clients: list[tuple[int, int]]) -> None:
    counted = [(weight, min(steps, COUNTED_STEPS_MAX)) for weight, steps in clients]
    total = sum(weight for weight, _ in clients)
    expected = Fraction(sum(weight * steps for weight, steps in counted), total)
    found = effective_steps(weighted_steps(clients), total)
    assert abs(Fraction(found) - expected) <= expected * Fraction(1, 1 << 53)
    assert min(steps for _, steps in counted) <= found <= max(steps for _, steps in counted)


@given(st.integers(1, COUNTED_STEPS_MAX))
def test_a_change_is_divided_and_rounded_once(n_steps: int) -> None:
    change = torch.randn(50, generator=torch.Generator().manual_seed(n_steps))
    assert torch.equal(normalised(change, n_steps), (change.double() / n_steps).float())


def test_steps_beyond_the_most_divide_and_count_as_the_most() -> None:
    change = torch.ones(3)
    assert torch.equal(normalised(change, 1 << 39), normalised(change, COUNTED_STEPS_MAX))
    assert weighted_steps([(2, 1 << 39)]) == 2 * COUNTED_STEPS_MAX
