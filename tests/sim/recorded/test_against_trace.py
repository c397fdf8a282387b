"""An experiment over a recorded fleet says how far off it is; what it asks otherwise is called that, and no error."""

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from tests.sim.federation.worlds import attempts_of, table
from umbel.__main__ import app, mount
from umbel.aggregation.canonical import canonical
from umbel.aggregation.run.trace import Trace, trace_of
from umbel.sim import simulate
from umbel.sim.recorded.against_trace import AGAIN, POINTS_MAX, RECORDED, AgainstTrace
from umbel.sim.results.plot import beside_the_record
from umbel.sim.results.shown import tables

FLEET = {"speed": {"step_s": 2.0, "spread": 0.4}, "network": {"up_bytes_per_s": 1e4, "down_bytes_per_s": 1e5}}


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Of a simulated run, so that another of the same experiment asks the same."""
    return trace_of(one.record for one in attempts_of(table(fleet=FLEET, rounds={"count": 40})))


def over(trace: Trace, folder: Path, **changes: Any) -> dict[str, Any]:
    """The experiment with the fleet of the trace."""
    (folder / "trace.json").write_text(canonical(trace))
    return table(**{"fleet": {"recorded": str(folder / "trace.json")}, **changes})


def against(trace: Trace, folder: Path, **changes: Any) -> AgainstTrace:
    (found,) = simulate(over(trace, folder, **changes)).against
    return found


def test_an_experiment_that_asks_what_was_recorded_differs_by_an_error(trace: Trace, tmp_path: Path) -> None:
    found = against(trace, tmp_path, rounds={"count": 20})
    (point,) = found.points
    assert (point.unlike, point.work_unlike, point.recorded_work) == ((), (), None)
    recorded, again = found.calibration.courses
    assert (recorded.label, again.label) == (RECORDED, AGAIN)
    for course in (again, point.course):
        assert course.update_bytes == recorded.update_bytes
        assert course.reports == recorded.reports == 6
        assert course.open_s == pytest.approx(recorded.open_s, rel=0.35)
        assert course.bytes_up is not None
        assert recorded.bytes_up is not None
        assert course.bytes_up == pytest.approx(recorded.bytes_up, rel=0.1)
    errors = {one.what: one for one in found.errors}
    assert errors["reports in"].relative == 0.0
    assert errors["committed"].relative == 0.0
    assert abs(errors["bytes up"].relative or math.inf) < 0.1
    assert errors["open, mean"].recorded == recorded.open_s


def test_the_error_is_of_the_recorded_question_whatever_the_experiment_asks(trace: Trace, tmp_path: Path) -> None:
    same = against(trace, tmp_path, rounds={"count": 2})
    other = against(trace, tmp_path, rounds={"count": 2, "window_s": 15.0, "target": 3}, training={"local_epochs": 5})
    assert same.errors == other.errors
    assert other.points[0].unlike == ("window_s 15, not 600", "target 3, not 6")
    (steps,) = other.points[0].work_unlike
    assert steps.startswith("steps a client")


def test_where_the_work_is_unlike_the_rounds_are_asked_of_the_recorded_work_too(trace: Trace, tmp_path: Path) -> None:
    rounds = {"count": 10, "target": 3}
    alike = against(trace, tmp_path, rounds=rounds).points[0]
    assert alike.recorded_work is None, "the experiment's own work is the recorded one"
    assert alike.unlike == ("target 3, not 6",)
    unlike = against(trace, tmp_path, rounds=rounds, training={"local_epochs": 5}).points[0]
    assert unlike.recorded_work is not None
    assert unlike.course.open_s > 3 * alike.course.open_s
    assert unlike.recorded_work.reports == 3
    assert unlike.recorded_work.open_s == pytest.approx(alike.course.open_s, rel=0.35)


def test_a_codec_with_fewer_bits_is_another_question_and_fewer_bytes(trace: Trace, tmp_path: Path) -> None:
    found = against(trace, tmp_path, rounds={"count": 4}, codec={"name": "eden", "bits": 2})
    (point,) = found.points
    (bytes_,) = point.work_unlike
    assert bytes_.startswith("bytes of an update")
    assert point.course.update_bytes < 0.2 * found.calibration.courses[0].update_bytes


def test_rounds_for_which_the_recorded_clients_are_too_few_have_no_answer_of_theirs(
    trace: Trace, tmp_path: Path
) -> None:
    found = against(trace, tmp_path, partition={"clients": 60}, rounds={"count": 1, "target": 50, "minimum": 40})
    (point,) = found.points
    assert "clients 60, not 30" in point.work_unlike
    assert point.recorded_work is None
    assert found.errors


def test_of_a_large_sweep_only_the_first_points_ask_for_the_recorded_work(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert POINTS_MAX > 1
    monkeypatch.setattr("umbel.sim.recorded.against_trace.POINTS_MAX", 1)
    changes = {"rounds": {"count": 1}, "training": {"local_epochs": 2}, "sweep": {"rounds.target": [3, 4]}}
    found = against(trace, tmp_path, **changes)
    assert [one.recorded_work is None for one in found.points] == [False, True]


def test_a_trace_of_an_older_coordinator_has_no_error_and_a_record(trace: Trace, tmp_path: Path) -> None:
    older = [replace(one, reports_wanted=None, reports_needed=None) for one in trace.attempts]
    found = against(replace(trace, attempts=tuple(older)), tmp_path, rounds={"count": 2, "window_s": 15.0})
    assert found.errors == ()
    assert [one.label for one in found.calibration.courses] == [RECORDED]
    assert found.points[0].unlike == ("window_s 15, not 600",)


def test_an_experiment_without_a_trace_stands_beside_none() -> None:
    results = simulate(table(rounds={"count": 1}))
    assert results.against == ()
    assert results.summary()["against"] == []


def test_a_trace_of_which_no_fleet_can_be_made_is_told_before_anything_is_simulated(
    trace: Trace, tmp_path: Path
) -> None:
    silent = tuple(
        replace(attempt, clients=tuple(replace(one, report_s=None, train_s=None) for one in attempt.clients))
        for attempt in trace.attempts
    )
    with pytest.raises(ValueError, match=r"trace\.json: no client has reported in this trace"):
        simulate(over(replace(trace, attempts=silent), tmp_path), tmp_path / "out")
    assert not (tmp_path / "out" / "runs").exists()


@pytest.fixture
def sweep(trace: Trace, tmp_path: Path) -> Path:
    (tmp_path / "trace.json").write_text(canonical(trace))
    (tmp_path / "what-if.toml").write_text("""
name = "what-if"
[data]
name = "digits"
[partition]
scheme = "dirichlet"
clients = 30
alpha = 0.5
[model]
hidden = [8]
[fleet]
recorded = "trace.json"
[rounds]
count = 2
target = 6
[training]
batch_size = 10
learning_rate = 0.1
[sweep]
"rounds.window_s" = [600.0, 20.0]
""")
    return tmp_path / "what-if.toml"


def umbel(*words: str) -> Any:
    mount()
    done = CliRunner(env={"COLUMNS": "100"}).invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done


def test_one_command_tells_the_error_and_what_each_point_asks(sweep: Path) -> None:
    out = sweep.parent / "out"
    told = umbel("simulate", str(sweep), "--out", str(out)).stdout
    for words in (
        "the recorded attempts, simulated with the fleet",
        "open, mean, s",
        RECORDED,
        AGAIN,
        "window_s=600.0 has the settings of the recorded run",
        "window_s=20.0 differs from the recorded run: window_s 20, not 600",
        "recorded.png",
    ):
        assert words in told
    assert min(imread(out / "recorded.png").shape[:2]) > 300


@pytest.mark.parametrize(
    ("window_s", "sentences"),
    [
        (15.0, ["all points differ from the recorded run: window_s 15, not 600"]),
        (600.0, []),
    ],
)
def test_what_all_points_ask_otherwise_is_said_once(
    trace: Trace, tmp_path: Path, window_s: float, sentences: list[str]
) -> None:
    rounds = {"count": 1, "window_s": window_s}
    found = against(trace, tmp_path, rounds=rounds, sweep={"rounds.target": [3, 4]})
    told = "\n".join(one.plain for one in tables(found) if isinstance(one, Text)).splitlines()
    own = [f"target={target} differs from the recorded run: target {target}, not 6" for target in (3, 4)]
    assert [line for line in told if "from the recorded run" in line] == [*sentences, *own]


def test_brackets_in_a_label_are_shown(trace: Trace, tmp_path: Path) -> None:
    work = [{"label": label, "rounds.target": target} for label, target in (("[a] few", 3), ("[/b] more", 4))]
    found = against(trace, tmp_path, rounds={"count": 1}, sweep={"work": work})
    console = Console(width=120, file=io.StringIO())
    console.print(*tables(found), sep="\n")
    shown = console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO above
    assert re.findall(r"^(\[a\] few|\[/b\] more) +\d", shown, re.MULTILINE) == ["[a] few", "[/b] more"]


def test_the_picture_says_which_points_ask_for_other_work(trace: Trace, tmp_path: Path) -> None:
    results = simulate(over(trace, tmp_path, rounds={"count": 3}, sweep={"training.local_epochs": [1, 3]}))
    figure = beside_the_record(results)
    legends = [legend for axes in figure.axes if (legend := axes.get_legend()) is not None]
    words = [text.get_text() for legend in legends for text in legend.get_texts()]
    assert [one for one in words if one.startswith("local_epochs")] == [
        "local_epochs=1",
        "local_epochs=3 (other work than was recorded)",
    ]


@pytest.mark.usefixtures("blank_pictures")
def test_the_error_is_in_the_summary_too(sweep: Path) -> None:
    out = sweep.parent / "out"
    told = json.loads(umbel("simulate", str(sweep), "--out", str(out), "--json").stdout)
    assert told == json.loads((out / "summary.json").read_text())
    (against,) = told["against"]
    assert against["trace"] == "trace.json"
    assert {"what", "unit", "recorded", "simulated", "relative"} == against["errors"][0].keys()
    assert [one["label"] for one in against["courses"]] == [RECORDED, AGAIN]
    assert [one["unlike"] for one in against["points"]] == [[], ["window_s 20, not 600"]]
