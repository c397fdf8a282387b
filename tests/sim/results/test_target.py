"""The round in which a run reaches its target accuracy is that of the definition of McMahan et al."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.federation.worlds import table
from umbel.sim import simulate
from umbel.sim.federation.rows import Row
from umbel.sim.results.target import reaching


@cache
def any_row() -> Row:
    return simulate(table(rounds={"count": 1})).trials[0].rows[0]


def rows_of(accuracies: Sequence[float | None]) -> list[Row]:
    """Rounds 1, 2, ... with these accuracies; each uploads 10 bytes and takes an hour."""
    return [
        replace(any_row(), round=n, accuracy=accuracy, bytes_up=10, now_s=3600.0 * n)
        for n, accuracy in enumerate(accuracies, 1)
    ]


@pytest.mark.parametrize(
    ("accuracies", "target", "rounds", "reached_at"),
    [
        ([0.5, 0.7, 0.9], 0.8, 2.5, 3),
        ([0.5, 0.7, 0.9], 0.9, 3.0, 3),
        ([0.5, 0.7, 0.3, 0.9], 0.8, 3.5, 4),  # from the best so far, not from the model before
        ([None, 0.4, None, None, None, 0.9], 0.8, 5.2, 6),  # between measured models
        ([0.9, 0.95], 0.8, 1.0, 1),  # nothing was measured before the first model
        ([None, None, 0.9], 0.8, 3.0, 3),
        ([0.8, 0.9], 0.8, 1.0, 1),
    ],
)
def test_the_curve_of_the_best_accuracy_so_far_crosses_the_target_there(
    accuracies: list[float | None], target: float, rounds: float, reached_at: int
) -> None:
    found = reaching(rows_of(accuracies), target)
    assert found is not None
    assert found.rounds == pytest.approx(rounds)
    assert found.row.round == reached_at
    assert found.bytes_up == 10 * reached_at


@pytest.mark.parametrize("accuracies", [[], [None, None], [0.5, 0.79, 0.7]])
def test_a_run_that_stays_below_its_target_never_reaches_it(accuracies: list[float | None]) -> None:
    assert reaching(rows_of(accuracies), 0.8) is None


@given(st.lists(st.none() | st.floats(0, 1), max_size=12), st.floats(0, 1))
def test_the_round_is_where_numpys_own_interpolation_has_the_target(
    accuracies: list[float | None], target: float
) -> None:
    found = reaching(rows_of(accuracies), target)
    measured = [(n, one) for n, one in enumerate(accuracies, 1) if one is not None]
    best = np.maximum.accumulate([one for _, one in measured]) if measured else np.zeros(0)
    assert (found is None) == (not len(best) or best[-1] < target)
    if found is None:
        return
    at = int(np.argmax(best >= target))
    assert found.row.round == measured[at][0]
    if at and best[at] - best[at - 1] > 1e-6:
        between = np.interp(target, best[at - 1 : at + 1], [measured[at - 1][0], measured[at][0]])
        assert found.rounds == pytest.approx(float(between))
    assert measured[max(0, at - 1)][0] <= found.rounds <= found.row.round


def test_findings_interpolate_rounds_and_count_hours_and_bytes_until_the_first_measured_model() -> None:
    results = simulate(table(target_accuracy=0.8, rounds={"count": 1}))
    (one,) = results.trials
    (point,) = replace(results, trials=(replace(one, rows=tuple(rows_of([0.5, 0.7, 0.9, 0.2]))),)).points
    assert point.reached_target == 1
    assert point.rounds_to_target is not None
    assert point.hours_to_target is not None
    assert point.bytes_up_to_target is not None
    assert point.rounds_to_target.mean == pytest.approx(2.5)
    assert point.hours_to_target.mean == 3.0
    assert point.bytes_up_to_target.mean == 30.0
