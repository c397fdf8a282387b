"""docs/how-to/simulate-your-own-data-and-model.md holds; and plays, whose model reads characters."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import ROOT
from tests.servers.real_data import real_files
from umbel.aggregation.messages import RunStatus
from umbel.sim import simulate
from umbel.sim.data.sets import arrays, hugging_face
from umbel.sim.data.sets.fetch import SHAKESPEARE

PAGE = (ROOT / "docs" / "how-to" / "simulate-your-own-data-and-model.md").read_text()
SECTION = PAGE.split("\n## Your own data and model\n")[1].split("\n## ")[0]


def example(language: str) -> str:
    """The section's one block in that language."""
    (block,) = re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)
    return str(block)


def test_the_page_s_own_data_and_model_are_simulated_from_the_folder_that_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wards.py").write_text(example("python"))
    (tmp_path / "wards.toml").write_text(example("toml"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "wards", raising=False)
    results = simulate("wards.toml", out="wards")
    assert [one.status for one in results.trials] == [RunStatus.FINISHED]
    accuracy = results.points[0].accuracy
    assert accuracy is not None
    assert accuracy.mean > 0.9
    assert {row["reported"] for row in results.rows} == {4}
    written = {path.name for path in (tmp_path / "wards").iterdir()}
    assert {"summary.json", "rounds.jsonl", "curves.png", "split.png", "groups.png"} <= written


@pytest.mark.parametrize("engine", ["sequential", pytest.param("processes", marks=pytest.mark.nightly)])
def test_what_one_s_own_code_prints_does_not_stand_in_the_json(tmp_path: Path, engine: str) -> None:
    (tmp_path / "wards.py").write_text("print('a word of its own')\n" + example("python"))
    (tmp_path / "wards.toml").write_text(example("toml"))
    settings = [f"engine.name={engine}", "rounds.count=1"]
    command = [sys.executable, "-m", "umbel", "simulate", "wards.toml", "--json"]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(done.stdout)["experiment"] == "wards"
    assert "a word of its own" in done.stderr


def test_every_function_that_the_page_names_is_where_it_says() -> None:
    named = re.findall(r"`(from_\w+)\(", SECTION)
    assert named == ["from_torch", "from_hugging_face", "from_partitioner", "from_flwr_datasets"]
    for name in named:
        assert callable(getattr(arrays if name == "from_torch" else hugging_face, name))


def test_the_plays_of_some_roles_are_simulated_into_a_folder(tmp_path: Path) -> None:
    folder = real_files(SHAKESPEARE)
    described = {
        "name": "plays",
        "data": {"name": "shakespeare", "train_limit": 2000, "test_limit": 100},
        "partition": {"scheme": "natural", "clients": 3},
        "model": {"name": "lstm"},
        "rounds": {"count": 1, "target": 2, "over_selection": 1.0},
        "training": {"local_steps": 2, "batch_size": 10, "learning_rate": 0.5},
    }
    results = simulate(described, out=tmp_path / "plays", data=folder)
    assert [one.status for one in results.trials] == [RunStatus.FINISHED]
    (row,) = (tmp_path / "plays" / "rounds.jsonl").read_text().splitlines()
    assert (json.loads(row)["committed"], json.loads(row)["reported"]) == (True, 2)
    written = {path.name for path in (tmp_path / "plays").iterdir()}
    assert {"summary.json", "curves.png", "split.png"} <= written
