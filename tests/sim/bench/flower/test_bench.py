"""The report of `umbel bench flower`: its rows, and what it says where something is missing."""

import json
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.repository import ROOT
from umbel.client.errors import AppError
from umbel.sim.bench.flower import bench
from umbel.sim.bench.flower.bench import NO_PEER, NoSuchApp, compare, find_flower, measure, rows_of
from umbel.sim.bench.flower.runs import AppRun, read_notes
from umbel.sim.bench.flower.workloads import CONFIG, AppWorkload, app_workloads
from umbel.sim.bench.report import BenchFailed
from umbel.sim.commands import bench_app

SMALL = next(one for one in app_workloads() if one.name == "small")
UMBEL, FLOWER, PLAIN = (
    AppRun(2.0, (9.0, 9.0, 0.1, 0.1), 0.7, 3.0),
    AppRun(30.0, (9.0, 9.0, 1.0, 1.0), 0.71, 3.0),
    AppRun(1.0, (9.0, 9.0, 0.05, 0.05), 0.69, 3.0),
)
RUNS = {"umbel": UMBEL, "flower": FLOWER, "plain": PLAIN}


def compared(runs: Mapping[str, AppRun], workload: AppWorkload = SMALL) -> bench.Compared:
    return compare(workload, runs, lambda engine, *_: runs[engine], quick=False)


def test_the_rows_have_the_settled_rounds_and_the_first_one_and_promise_five_times_and_a_tenth() -> None:
    rows = rows_of(compared(RUNS), "Flower 1.42")
    figures = [(row.what, row.against, round(row.ours), round(row.theirs), row.hold, row.holds) for row in rows]
    assert figures == [
        ("small: rounds per minute", "Flower 1.42", 600, 60, ">= 5", True),
        ("small: first round", "Flower 1.42", 2, 30, "<= 0.1", True),
        ("small: rounds per minute", "plain loop, one process", 600, 1200, None, None),
        ("small: first round", "plain loop, one process", 2, 1, None, None),
    ]
    slow = rows_of(compared({**RUNS, "umbel": AppRun(4.0, (0.3, 0.3), 0.7, 3.0)}), "Flower 1.42")
    assert [row.holds for row in slow[:2]] == [False, False]


def test_the_engines_take_turns_and_their_median_counts() -> None:
    order, starts = list[str](), iter([5.0, 1.0, 7.0, 1.0, 6.0, 1.0])

    def run(engine: str, workload: AppWorkload, n_rounds: int) -> AppRun:
        order.append(engine)
        assert (workload, n_rounds) == (SMALL, SMALL.rounds)
        return replace(RUNS[engine], start_s=next(starts))

    found = compare(SMALL, ["umbel", "plain"], run, quick=False)
    assert order == ["umbel", "plain"] * 3
    assert found.start_s("umbel") == 6.0
    assert (
        "umbel, 3 x: 600 to 600 rounds/min, the fastest round 600, first round after 5 to 7 s, accuracy 70%."
        in found.spread
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            AppRun(1.0, (1.0,), 0.5, 3.0),
            "small in flower ends with an accuracy of 50.0%, and the plain loop with 69.0%",
        ),
        (AppRun(1.0, (1.0,), 0.7, 3.1), "small in flower ends with another model than the plain loop: its norm is 3.1"),
        (AppRun(1.0, (1.0,), float("nan"), 3.0), "accuracy"),
        (AppRun(1.0, (1.0,), 0.7, float("nan")), "another model"),
    ],
)
def test_an_engine_that_ends_with_another_model_fails_the_benchmark(other: AppRun, said: str) -> None:
    with pytest.raises(BenchFailed, match=said):
        compared({**RUNS, "flower": other})


def notes(*rounds: tuple[int, int, int]) -> str:
    return "\n".join(
        json.dumps({"round": n, "ended_at": 100.0 + n, "n_trained": t, "n_evaluated": e, "accuracy": 0.5, "norm": 2.0})
        for n, t, e in rounds
    )


def test_notes_are_believed_if_every_round_has_all_replies() -> None:
    assert read_notes(notes((1, 10, 5), (2, 10, 5)), 90.0, "x", 2, 10) == AppRun(11.0, (1.0,), 0.5, 2.0)
    with pytest.raises(BenchFailed, match="x has ended 1 rounds instead of 2"):
        read_notes(notes((1, 10, 5)), 90.0, "x", 2, 10)
    with pytest.raises(BenchFailed, match="x has ended 0 rounds instead of 2"):
        read_notes("", 90.0, "x", 2, 10)
    with pytest.raises(BenchFailed, match="in round 2 of x 9 nodes trained and 5 evaluated, instead of 10 and 5"):
        read_notes(notes((1, 10, 5), (2, 9, 5)), 90.0, "x", 2, 10)
    with pytest.raises(BenchFailed, match="10 nodes trained and 4 evaluated"):
        read_notes(notes((1, 10, 5), (2, 10, 4)), 90.0, "x", 2, 10)


def test_without_a_peer_umbel_and_the_plain_loop_are_measured_and_the_report_says_how_to_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[tuple[str, Path]]()

    def run(engine: str, python: Path, workload: AppWorkload, n_rounds: int) -> AppRun:
        asked.append((engine, python))
        return RUNS[engine]

    monkeypatch.setattr(bench, "run_app_in", run)
    monkeypatch.setattr(bench, "require_flower", lambda: None)
    report = measure(quick=True)
    assert asked == [("umbel", Path(sys.executable)), ("plain", Path(sys.executable))] * 3
    assert NO_PEER in report.notes
    assert "--peer-python" in NO_PEER
    assert {row.against for row in report.rows} == {"plain loop, one process"}
    assert len(measure(quick=True, only="large").rows) == 2


def test_an_interpreter_without_flower_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise AppError('a Flower app needs Flower: pip install "umbel[flower]"')

    monkeypatch.setattr(bench, "require_flower", missing)
    refused = CliRunner().invoke(bench_app, ["flower"])
    assert refused.exit_code == 1
    assert refused.output == (
        "umbel: umbel bench flower simulates Flower apps in this interpreter: a Flower app needs Flower: "
        'pip install "umbel[flower]"\n'
    )


@pytest.mark.parametrize(
    ("has", "said"),
    [(["flwr", "torch"], "has no ray, scikit-learn; install flwr\\[simulation\\]"), ([], "has no flwr")],
)
def test_a_peer_without_its_packages_is_refused(tmp_path: Path, has: Sequence[str], said: str) -> None:
    program, python = tmp_path / "fake.py", tmp_path / "python"
    program.write_text(f"print({json.dumps(json.dumps(dict.fromkeys(has, '1.0')))})")
    python.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(program))}\n")
    python.chmod(0o755)
    with pytest.raises(BenchFailed, match=said):
        find_flower(python)


def test_an_app_that_there_is_not_is_named() -> None:
    with pytest.raises(NoSuchApp, match="there is no app tiny; choose one of quickstart, small, large"):
        measure(quick=True, only="tiny")


def test_the_apps_are_the_quickstart_but_for_their_model_and_data(tmp_path: Path) -> None:
    example = ROOT / "examples" / "flower_quickstart"
    for workload in app_workloads():
        app = workload.write(tmp_path / workload.name)
        changed = [
            str(path.relative_to(app))
            for path in app.rglob("*")
            if path.is_file() and path.read_bytes() != (example / path.relative_to(app)).read_bytes()
        ]
        assert changed == ([] if workload.n_words is None else ["pytorchexample/task.py"])
    table = tomllib.loads((example / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert {name: table[name] for name in CONFIG} == CONFIG
    assert table["fraction-evaluate"] == 0.5, "the plain loop lets half of the nodes evaluate"
