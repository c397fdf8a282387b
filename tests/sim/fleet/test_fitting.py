"""What is known of clients from few measurements, some of them cut off, against what is true of made-up ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.sim.fleet.recorded import fit


@pytest.mark.parametrize(("cut_at", "near"), [(np.inf, 0.05), (1.2, 0.1), (0.5, 0.15)])
def test_the_true_numbers_are_found_though_much_is_cut_off(cut_at: float, near: float) -> None:
    rng, n = np.random.default_rng(5), 2000
    means = 1.0 + 0.7 * rng.standard_normal(n)
    clients = np.repeat(np.arange(n), 8)
    logs = means[clients] + 0.3 * rng.standard_normal(len(clients))
    fitted = fit(clients, np.minimum(logs, cut_at), logs > cut_at, n)
    assert fitted is not None
    assert fitted.within == pytest.approx(0.3, rel=near)
    assert fitted.mean.mean() == pytest.approx(1.0, abs=near)
    spread = np.sqrt(fitted.mean.var() + (fitted.deviation**2).mean())
    assert spread == pytest.approx(0.7, rel=near)


def test_the_fewer_measurements_the_more_a_client_is_taken_for_one_of_the_fleet() -> None:
    rng = np.random.default_rng(6)
    clients = np.concatenate([np.repeat(np.arange(50), 20), [50]])  # the 51st with one, the 52nd with none
    logs = np.concatenate([(rng.standard_normal(50)).repeat(20) + 0.5 * rng.standard_normal(1000), [4.0]])
    fitted = fit(clients, logs, np.zeros(len(logs), np.bool_), 52)
    assert fitted is not None
    assert abs(fitted.mean[51]) < 0.5 < fitted.mean[50] < 4.0
    assert fitted.deviation[51] > fitted.deviation[50] > fitted.deviation[:50].max()


def test_without_a_measurement_there_is_nothing_to_fit() -> None:
    nothing = np.zeros(0)
    assert fit(nothing.astype(np.int64), nothing, nothing.astype(np.bool_), 3) is None
    assert fit(np.zeros(2, np.int64), np.ones(2), np.ones(2, np.bool_), 3) is None


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-30, 30), st.booleans()), min_size=1, max_size=20))
def test_whatever_was_measured_what_is_known_is_finite(measured: list[tuple[int, float, bool]]) -> None:
    clients, logs, is_cut = (np.array(column) for column in zip(*measured, strict=True))
    fitted = fit(clients, logs, is_cut, 5)
    assert (fitted is None) == all(cut for _, _, cut in measured)
    if fitted is not None:
        for values in (fitted.mean, fitted.deviation, np.array(fitted.within)):
            assert np.isfinite(values).all()
        assert (fitted.deviation > 0).all()
