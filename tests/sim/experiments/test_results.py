"""What an experiment has shown, and how sure that is; and the command that a person types."""

import json
from pathlib import Path

import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from tests.sim.experiments.worlds import table
from umbel.__main__ import app, mount
from umbel.sim import simulate
from umbel.sim.experiments.estimate import Estimate

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
    assert results._repr_png_()[:8] == b"\x89PNG\r\n\x1a\n"  # pyright: ignore[reportPrivateUsage] - what a notebook calls


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


def test_a_folder_in_which_nothing_was_begun_takes_the_file_as_it_was_mended(
    command_line: CliRunner, tmp_path: Path
) -> None:
    (tmp_path / "small.toml").write_text(FILE)
    arguments = ["simulate", str(tmp_path / "small.toml"), "--out", str(tmp_path / "out"), "--set", "rounds.count=1"]
    assert command_line.invoke(app, [*arguments, "--set", "partition.clients=5000"]).exit_code == 1
    assert command_line.invoke(app, arguments).exit_code == 0


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
