"""Both of our own engines do the same work, which the benchmark counts."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is in the environment of the Flower tests only (make test)")

from umbel.sim.bench.flower.runs import run_app_in
from umbel.sim.bench.flower.workloads import app_workloads
from umbel.sim.bench.report import BenchFailed

pytestmark = pytest.mark.slow
SMALL = next(one for one in app_workloads() if one.name == "small")


def test_the_plain_loop_and_the_simulator_come_to_the_same_model() -> None:
    few = replace(SMALL, n_nodes=4)
    ours, plain = (run_app_in(engine, Path(sys.executable), few, 3) for engine in ("umbel", "plain"))
    assert ours.norm == pytest.approx(plain.norm, rel=1e-5)
    assert plain.norm > 0
    assert len(ours.rounds_s) == len(plain.rounds_s) == 2
    assert ours.start_s > 0


def test_a_run_that_fails_is_told_with_the_end_of_its_log() -> None:
    with pytest.raises(BenchFailed, match="small in umbel ended with status 1; the last lines of its log:\n"):
        run_app_in("umbel", Path(sys.executable), replace(SMALL, n_nodes=1), 1)
