"""Cohorts of all sizes are trained stacked and one client after another, and drawn."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from umbel.sim.bench.simulate import cohorts as simulate_cohorts
from umbel.sim.bench.simulate.bench import measure
from umbel.sim.bench.simulate.cohorts import cohort_rows
from umbel.sim.bench.simulate.workloads import workloads
from umbel.sim.engines.device import NoSuchDevice
from umbel.sim.engines.work import EngineError


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_cohorts, "_NAMES", ("A", "C"))
    monkeypatch.setattr(simulate_cohorts, "_QUICK", (1, 5, 101))
    monkeypatch.setattr(simulate_cohorts, "_TURNS", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_each_cohort_that_there_are_clients_for_is_trained_in_both_ways_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate_cohorts, "_QUICK_LONG_S", 1e9)
    rows = cohort_rows("cpu", quick=True, plot=tmp_path / "cohorts.png")
    sizes = {"A": (1, 5), "C": (1, 5, 101)}  # A has a hundred clients
    assert [row.what for row in rows] == [
        f"{name}: {n} at once on cpu, stacked" for name, several in sizes.items() for n in several
    ]
    assert all(row.ours > 0 and row.theirs > 0 for row in rows)
    assert min(imread(tmp_path / "cohorts.png").shape[:2]) > 300


@pytest.mark.usefixtures("few")
def test_what_has_taken_long_is_not_asked_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_cohorts, "_QUICK_LONG_S", 0.0)
    rows = measure(quick=True, only="cohorts").rows
    assert [row.what for row in rows] == [f"{name}: 1 at once on cpu, stacked" for name in ("A", "C")]


def test_cohorts_are_of_small_and_large_clients_alike() -> None:
    population = next(one for one in workloads() if one.name == "C").population()
    sizes = population.sizes(np.arange(population.n_clients))
    for n in (1, 10, 300, 1000, 3000):
        cohort = simulate_cohorts._of_all_sizes(population, n)  # pyright: ignore[reportPrivateUsage]
        assert len(cohort) == n
        assert np.median(sizes[cohort]) == pytest.approx(np.median(sizes), rel=0.15)


def test_a_device_that_there_is_not_is_refused() -> None:
    with pytest.raises(EngineError, match=r"torch finds no GPU here|there is no GPU"):
        measure(quick=True, only="cohorts", device="cuda:99")
    with pytest.raises(NoSuchDevice, match="not 'gpu'"):
        measure(quick=True, device="gpu")
