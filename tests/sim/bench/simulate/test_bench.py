"""The simulator's benchmark compares what it says it does: the same rounds of the same clients."""

import numpy as np
import pytest
from typer.testing import CliRunner

from umbel.sim.bench.simulate.bench import NoSuchWorkload, measure
from umbel.sim.bench.simulate.own_clients import OwnRounds
from umbel.sim.bench.simulate.workloads import workloads
from umbel.sim.commands import bench_app


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", ["A", pytest.param("Cs", marks=pytest.mark.nightly)])
def test_both_sides_come_to_the_same_model(name: str) -> None:
    """Or the benchmark fails; how long they take is not asked here."""
    report = measure(quick=True, only=name)
    ways = ("linear chains", "any module")
    both = [f"{name}: {way}, {part}" for way in ways for part in ("training", "whole round")]
    assert [row.what for row in report.rows] == [*both, f"{name}: auto takes batched, training"]
    assert all(row.ours > 0 and row.theirs > 0 for row in report.rows)


@pytest.mark.slow
def test_real_clients_and_a_bare_loop_over_the_same_train_come_to_the_same_sum() -> None:
    rounds = OwnRounds()
    ours, theirs = rounds.engine(), rounds.bare_loop()
    assert float(theirs.norm()) > 0
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5, "summed in another order"


def test_the_workloads_are_those_of_the_papers() -> None:
    by_name = {one.name: one for one in workloads()}
    counts = {name: sum(p.numel() for p in one.recipe.make().parameters()) for name, one in by_name.items()}
    assert counts == {"A": 4810, "C": 610, "Cs": 610, "B": 1_663_370}
    population = by_name["Cs"].population()
    assert population.sizes(np.arange(population.n_clients)).tolist() == [20] * 1000


def test_a_workload_that_there_is_not_is_named() -> None:
    with pytest.raises(NoSuchWorkload, match="no part D; choose one of A, C, Cs, B, M, clients, start, cohorts"):
        measure(quick=True, only="D")
    refused = CliRunner().invoke(bench_app, ["simulate", "--only", "Z"])
    assert refused.exit_code == 1
    assert refused.output == "umbel: there is no part Z; choose one of A, C, Cs, B, M, clients, start, cohorts\n"
