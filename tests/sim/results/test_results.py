"""What an experiment has shown, and how sure that is; and the command that a person types."""

import json
import re
from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from typer.testing import CliRunner

from tests.sim.federation.worlds import table
from umbel.__main__ import app, mount
from umbel.sim import simulate
from umbel.sim.data.data_set import DataSet, Natural, SampleSet
from umbel.sim.experiment.trials import Estimate
from umbel.sim.results.plot import panels
from umbel.sim.results.shown import as_table

ROW_KEYS = {
    *("round", "model_version", "model_sha256", "accuracy", "loss", "selected", "reported", "partial", "dropped"),
    *("bytes_up", "bytes_down", "wall_s", "virtual_s"),
}
FILE = """
name = "small"
seeds = [0, 1]
target_accuracy = 0.2
[data]
name = "digits"
[partition]
scheme = "iid"
clients = 20
[model]
hidden = [8]
[rounds]
count = 3
target = 5
[training]
learning_rate = 0.1
[sweep]
"training.local_epochs" = [1, 3]
"""
SWEPT = {
    "rounds.target": [3, 6],
    "method": [{"label": "mu 0"}, {"label": "mu 1", "training.proximal_mu": 1.0}],
}


def test_the_interval_is_students() -> None:
    """Of 2, 4, 6: mean 4, deviation 2, t(0.975, 2) = 4.3027: 4 +- 4.968."""
    found = Estimate.of([2.0, 4.0, 6.0])
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert (found.mean, found.n) == (4.0, 3)
    assert found.high - found.mean == pytest.approx(4.3027 * 2 / 3**0.5, rel=1e-4)
    assert Estimate.of([]) is None
    assert Estimate.of([0.5]) == Estimate(0.5, None, None, 1)


def test_from_python_nothing_is_written_and_all_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = simulate(table(seeds=[0, 1]))
    assert not list(tmp_path.iterdir())
    rows = list(results.rows)
    assert len(rows) == 8
    assert rows[0].keys() >= ROW_KEYS
    (point,) = results.points
    assert point.seeds == (0, 1)
    assert point.accuracy is not None
    assert point.accuracy.low is not None
    shown = results._repr_html_()  # pyright: ignore[reportPrivateUsage] - what a notebook calls
    header, (cells,) = as_table(results)
    html = ElementTree.fromstring(f"<div>{shown.partition('<img')[0]}</div>")
    assert list(html.itertext()) == ["small", *header, *cells, *results.leans]
    (picture,) = re.findall(r'src="data:image/png;base64,([^"]+)"', shown)
    assert b64decode(picture)[:8] == b"\x89PNG\r\n\x1a\n"
    assert repr(results).splitlines()[0] == "small"
    assert f"{point.accuracy.mean:.1%} ± " in repr(results)


def test_from_python_bars_are_shown_where_they_are_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    simulate(table(seeds=[0, 1]), progress=True)
    told = capfd.readouterr()
    assert "seed 1" in told.err
    assert "4/4" in told.err
    assert not told.out
    simulate(table(), progress=False)
    assert not capfd.readouterr().err


def test_time_is_wasted_on_what_is_late_lost_or_not_needed_and_on_rounds_that_make_no_model() -> None:
    fleet = {"speed": {"step_s": 1.0, "spread": 1.0}, "dropouts": {"per_round": 0.4}}
    rows = simulate(table(fleet=fleet, rounds={"over_selection": 1.5, "minimum": 6, "window_s": 8.0})).trials[0].rows
    assert {row.committed for row in rows} == {True, False}
    for row in rows:
        assert row.busy_s > 0
        assert row.wasted_s == row.busy_s if not row.committed else 0 < row.wasted_s < row.busy_s
    none = simulate(table(rounds={"over_selection": 1.0})).points[0].wasted_share
    assert none is not None
    assert none.mean == 0


def test_the_wasted_share_is_that_of_the_whole_run() -> None:
    fleet = {"dropouts": {"per_round": 0.3}}
    results = simulate(table(fleet=fleet, rounds={"over_selection": 1.0}))
    (point,), rows = results.points, results.trials[0].rows
    assert point.wasted_share is not None
    assert point.wasted_share.mean == pytest.approx(sum(r.wasted_s for r in rows) / sum(r.busy_s for r in rows))
    assert 0 < point.wasted_share.mean < 1


@pytest.mark.parametrize(("score_every", "late"), [(1, [2, 3, 4]), (2, [3, 4])])
def test_what_is_late_is_the_second_half_of_the_measurements(score_every: int, late: list[int]) -> None:
    results = simulate(table(rounds={"count": 5}, engine={"score_every": score_every}))
    (point,), rows = results.points, [results.trials[0].rows[place] for place in late]
    assert point.late_accuracy is not None
    assert point.late_loss is not None
    assert point.late_accuracy.mean == pytest.approx(sum(row.accuracy or 0 for row in rows) / len(rows))
    assert point.late_loss.mean == pytest.approx(sum(row.loss or 0 for row in rows) / len(rows))


def wards() -> DataSet:
    """Three wards of 40, 60 and 80 samples, of which each holds its last tenth back; the third's classes are turned."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(180, 4, generator=generator)
    classes = (inputs[:, 0] > 0).long()
    classes[100:] = 1 - classes[100:]
    parts = [np.arange(0, 40), np.arange(40, 100), np.arange(100, 180)]
    trained, held = tuple(p[: -len(p) // 10] for p in parts), tuple(p[-len(p) // 10 :] for p in parts)
    samples = SampleSet(inputs, classes)
    natural = Natural("ward", ("east", "north", "turned"), trained, held)
    return DataSet("wards", samples, np.concatenate(trained), samples.take(np.concatenate(held)), 2, natural)


def test_the_last_model_is_measured_for_each_holder_whether_it_takes_part_or_not(tmp_path: Path) -> None:
    described = table(
        data={"name": f"{__name__}:wards"},
        partition=None,
        model={"name": "logistic", "hidden": None},
        rounds={"count": 20, "target": 1, "over_selection": 1.0},
        training={"learning_rate": 0.5},
    )
    described["model"] = {"name": "logistic"}
    described["partition"] = {"scheme": "natural"}
    two, third = (
        {"label": "two", "partition.only": ["east", "north"]},
        {"label": "third", "partition.only": ["turned"]},
    )
    results = simulate({**described, "sweep": {"who": [two, third]}}, tmp_path / "out")
    for point, right in zip(results.points, ({"east", "north"}, {"turned"}), strict=True):
        assert list(point.groups) == ["east", "north", "turned"]
        for name, estimate in point.groups.items():
            assert (estimate.mean > 0.7) == (name in right), name
    again = simulate({**described, "sweep": {"who": [two, third]}}, tmp_path / "out")
    assert again.points[0].groups == results.points[0].groups
    assert min(imread(tmp_path / "out" / "groups.png").shape[:2]) > 300


def test_data_that_are_nobodys_by_nature_have_no_groups() -> None:
    assert simulate(table(rounds={"count": 1})).points[0].groups == {}


@pytest.mark.parametrize(("n_seeds", "n_bands"), [(1, 0), (2, 0), (3, 1)])
def test_a_confidence_band_is_drawn_from_three_seeds_on(n_seeds: int, n_bands: int) -> None:
    figure = simulate(table(rounds={"count": 2}, seeds=list(range(n_seeds)))).plot()
    assert [len(axes.collections) for axes in figure.axes[:3]] == [n_bands] * 3


@pytest.mark.parametrize(("sweep", "n_columns"), [({"rounds.target": [3, 6]}, 0), (SWEPT, 2), ({}, 0)])
def test_where_two_things_are_swept_there_is_a_column_for_each_value_of_the_first(
    sweep: dict[str, Any], n_columns: int
) -> None:
    figures = panels(simulate(table(rounds={"count": 2}, sweep=sweep)))
    if not n_columns:
        assert not figures
        return
    figure = figures[""]
    assert len(figure.axes) == 3 * n_columns
    assert [axes.get_title("left") for axes in figure.axes[:n_columns]] == [
        "target=3: accuracy on the test set",
        "target=6: accuracy on the test set",
    ]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["mu 0", "mu 1"]
    for axes in figure.axes:
        assert len([line for line in axes.get_lines() if len(line.get_xdata()) == 2]) == 2  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.usefixtures("blank_pictures")
def test_where_three_things_are_swept_each_value_of_the_first_has_a_picture_and_measured_figures_have_rows(
    tmp_path: Path,
) -> None:
    sweep = {"training.learning_rate": [0.1, 0.2], **SWEPT}
    measure = {"train_loss": True, "updates": True}
    results = simulate(table(fleet=None, rounds={"count": 2}, sweep=sweep, measure=measure), tmp_path)
    figures = panels(results)
    assert list(figures) == ["learning_rate=0.1", "learning_rate=0.2"]
    for figure in figures.values():
        assert [axes.get_title("left") for axes in figure.axes] == [
            *("target=3: accuracy on the test set", "target=6: accuracy on the test set"),
            *("loss on the test set", "loss on the test set"),
            *("training loss of all clients", "training loss of all clients"),
            *("dissimilarity of the clients' updates", "dissimilarity of the clients' updates"),
        ]
        for place, axes in enumerate(figure.axes):
            drawn = [list(map(float, line.get_ydata())) for line in axes.get_lines()]  # type: ignore[arg-type]
            assert len(drawn) == 2
            if place >= 6:
                assert all(value >= 1.0 for line in drawn for value in line)
    assert sorted(path.name for path in tmp_path.glob("panels*")) == [f"panels-{value}.png" for value in figures]


@pytest.fixture(scope="module")
def command_line() -> CliRunner:
    mount()
    return CliRunner()


def test_the_command_leaves_rounds_a_summary_and_pictures(command_line: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(FILE)
    out = tmp_path / "out"
    done = command_line.invoke(app, ["simulate", str(tmp_path / "small.toml"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "local_epochs=3" in done.stdout
    rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    assert rows[0].keys() >= ROW_KEYS
    summary = json.loads((out / "summary.json").read_text())
    assert [point["label"] for point in summary["points"]] == ["local_epochs=1", "local_epochs=3"]
    assert len(summary["runs"]) == 4
    for picture in ("curves.png", "split.png"):
        assert min(imread(out / picture).shape[:2]) > 300


@pytest.mark.usefixtures("blank_pictures")
def test_the_command_says_as_json_what_it_found_and_takes_values_from_the_line(
    command_line: CliRunner, tmp_path: Path
) -> None:
    (tmp_path / "small.toml").write_text(FILE)
    arguments = ["simulate", str(tmp_path / "small.toml"), "--out", str(tmp_path / "out"), "--json"]
    done = command_line.invoke(app, [*arguments, "--set", "rounds.count=1", "--set", "seeds=[7]"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [run["seed"] for run in told["runs"]] == [7, 7]
    assert all(point["rounds"]["mean"] == 1 for point in told["points"])


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_the_command_fails_where_every_run_has_and_says_why(
    command_line: CliRunner, tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "small.toml").write_text(FILE)
    diverging = ["--set", "training.learning_rate=100000", "--set", "rounds.attempts_max=1", "--set", "seeds=[7]"]
    where = [str(tmp_path / "small.toml"), "--out", str(tmp_path / "out")]
    done = command_line.invoke(app, ["simulate", *where, *diverging, *arguments])
    assert done.exit_code == 1, done.output
    told = " ".join(done.stdout.split())
    assert "have declined the last time, such as for this: value" in told
    assert "train with a smaller learning rate" in told
    assert "A longer window_s" not in told


def test_a_folder_in_which_nothing_was_begun_takes_the_file_as_it_was_mended(
    command_line: CliRunner, tmp_path: Path
) -> None:
    (tmp_path / "small.toml").write_text(FILE)
    arguments = ["simulate", str(tmp_path / "small.toml"), "--out", str(tmp_path / "out"), "--set", "rounds.count=1"]
    assert command_line.invoke(app, [*arguments, "--set", "partition.clients=5000"]).exit_code == 1
    assert command_line.invoke(app, arguments).exit_code == 0


def test_names_are_shown_as_they_are(command_line: CliRunner, tmp_path: Path) -> None:
    """Neither rich's markup nor matplotlib's formulas are read in them."""
    (tmp_path / "small.toml").write_text(FILE)
    out = tmp_path / "out[" / "red]"
    labels = r"""{what = [{label = '[/x] $\frac{$', "rounds.count" = 1}, {label = "[red]", "rounds.count" = 2}]}"""
    arguments = ["simulate", str(tmp_path / "small.toml"), "--out", str(out), "--set", "seeds=[7]"]
    done = command_line.invoke(app, [*arguments, "--set", f"sweep={labels}"])
    assert done.exit_code == 0, done.output
    assert "[/x] $\\frac{$" in done.stdout
    assert "[red]" in done.stdout
    assert str(out) in done.stdout.replace("\n", "")
    assert min(imread(out / "curves.png").shape[:2]) > 300


@pytest.mark.parametrize("change", ["seeds=0", "seeds=[]", "seeds=[-1]", 'target_accuracy="x"', "sweep=3"])
def test_a_mistake_at_the_top_is_a_sentence_without_the_librarys_words(
    command_line: CliRunner, tmp_path: Path, change: str
) -> None:
    (tmp_path / "small.toml").write_text(FILE)
    done = command_line.invoke(app, ["simulate", str(tmp_path / "small.toml"), "--out", "out", "--set", change])
    assert done.exit_code == 1
    assert change.split("=")[0].rstrip("s") in done.output
    assert "pydantic" not in done.output


def test_a_file_that_there_is_not_is_named(command_line: CliRunner, tmp_path: Path) -> None:
    done = command_line.invoke(app, ["simulate", str(tmp_path / "no.toml")])
    assert done.exit_code == 1
    assert f"there is no file {tmp_path / 'no.toml'}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "rounds.target=0"], "rounds: target must lie between 1"),
        (["--set", "target"], "KEY=VALUE"),
        (["--set", "data.name=mnist"], "--data"),
    ],
)
def test_a_mistake_ends_with_a_sentence(
    command_line: CliRunner, tmp_path: Path, arguments: list[str], words: str
) -> None:
    (tmp_path / "small.toml").write_text(FILE)
    out = ["--out", str(tmp_path / "out")]
    done = command_line.invoke(app, ["simulate", str(tmp_path / "small.toml"), *out, *arguments])
    assert done.exit_code == 1
    assert words in done.stderr
    assert "Traceback" not in done.output


def test_code_that_ends_the_program_is_no_success(
    command_line: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "small.toml").write_text(FILE)
    (tmp_path / "exiting_net.py").write_text("import sys\n\ndef net():\n    sys.exit(0)\n")
    named = ["--set", 'model={name="exiting_net:net"}', "--out", str(tmp_path / "out")]
    done = command_line.invoke(app, ["simulate", str(tmp_path / "small.toml"), *named])
    assert done.exit_code == 1
    assert "ended the program (status 0)" in done.stderr


def test_a_run_in_which_no_device_was_at_work_has_wasted_nothing() -> None:
    results = simulate(table())
    (one,) = results.trials
    idle = replace(one, rows=tuple(replace(row, busy_s=0.0, wasted_s=0.0) for row in one.rows))
    (point,) = replace(results, trials=(idle,)).points
    assert point.wasted_share is not None
    assert point.wasted_share.mean == 0.0
