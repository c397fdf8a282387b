"""The pages of one's own client: their code and fields are as they stand there, and all commands of the flow run."""

import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from safetensors.torch import load_file

from examples import own_client
from tests.repository import ROOT
from tests.servers.ports import own_port
from umbel.client import Evaluation, LocalPlan, TorchClient, TrainResult

PAGE = ROOT / "docs" / "tutorial" / "try-it-before-you-deploy.md"
OWN_CLIENT = (ROOT / "docs" / "how-to" / "train-with-your-own-code.md").read_text()
STOP = "kill $coordinator"  # the last command of the page
LIMIT_S = 600.0


def commands(page: Path) -> str:
    """All shell blocks, in their order."""
    return "".join(re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL))


def newcomers_folder(folder: Path) -> Path:
    """A checkout with an installed `umbel`, as far as the page needs one."""
    (folder / "examples").symlink_to(ROOT / "examples")
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "umbel").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m umbel "$@"\n')
    (programs / "umbel").chmod(0o755)
    (programs / "activate").write_text(f'PATH="{programs}:$PATH"\n')
    return folder


def typed(script: str, folder: Path, port: int) -> str:
    """What the commands print. The shell stops at the first one that fails, and takes its sites along."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UMBEL_")}
    environment |= {"PYTHONPATH": str(ROOT), "UMBEL_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ending = "trap 'kill $(jobs -p) 2> /dev/null; wait' EXIT\n"
    shell = ["bash", "-e", "-c", ending + script.replace("8750", str(port))]
    done = subprocess.run(
        shell, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    logs = "".join(log.read_text()[-2000:] for log in folder.glob("try/*.log"))
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{logs}"
    return done.stdout


@pytest.mark.nightly  # a dozen commands, each of which imports torch
def test_all_commands_of_the_page_work_in_their_order(tmp_path: Path) -> None:
    folder = newcomers_folder(tmp_path)
    table = "umbel run show own-client --json > try/shown.json\n"
    said = typed(commands(PAGE).replace(STOP, table + STOP), folder, own_port())
    assert " wrong " not in said
    assert (folder / "try/simulated/curves.png").stat().st_size > 1000
    simulated = [json.loads(line) for line in (folder / "try/simulated/rounds.jsonl").read_text().splitlines()]
    ended = [one for one in json.loads((folder / "try/shown.json").read_text())["ended"] if one["committed"]]
    assert [one["reported"] for one in ended] == [4] * 11, "each site is in each sum, as the run file asks"
    assert [one["task"] for one in ended] == [one["task"] for one in simulated] == [*["training"] * 10, "evaluation"]
    for figures in (simulated[-2]["test_metrics"], simulated[-1]["evaluation"], ended[-1]["evaluation"]):
        assert figures["scores.auc"] > 0.9
        assert figures["confusion.sensitivity"] > 0.8
    assert load_file(folder / "try/model.safetensors").keys() == own_client.client().model.state_dict().keys()


def test_the_page_of_your_own_client_shows_the_class_as_it_is() -> None:
    (block,) = re.findall(r"```python\n(class Hospital.*?)```", OWN_CLIENT, re.DOTALL)
    assert block in (ROOT / "examples" / "own_client.py").read_text()
    assert len([line for line in block.splitlines() if line.strip()]) <= 28


def first_cells(head: str) -> set[str]:
    """The names in the first column of the table with this head."""
    table = OWN_CLIENT.split(f"| {head} | meaning |")[1].split("\n\n")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(?:plan\.)?(\w+)", cell)}


def test_the_tables_of_results_and_of_the_plan_name_what_they_have() -> None:
    for_canaries = {"steps_full", "first_loss", "last_loss"}
    assert first_cells("`TrainResult(...)`") == {one.name for one in fields(TrainResult)} - for_canaries
    assert first_cells("`Evaluation(...)`") == {one.name for one in fields(Evaluation)}
    assert all(hasattr(LocalPlan(steps=1), name) for name in first_cells("field"))
    assert first_cells("argument") == set(inspect.signature(TorchClient).parameters)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_flower_example_as_a_client_of_its_own_learns(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "move-from-flower.md").read_text()
    (code,) = re.findall(r"```python\n(from pytorchexample.*?)```", page, re.DOTALL)
    (tmp_path / "my_site.py").write_text(code)
    training = {"learning_rate": 0.1, "momentum": 0.9, "batch_size": 32, "local_epochs": 1}
    lines = [f"{key} = {value}" for key, value in training.items()]
    assert all(f"`{line}`" in page.replace("\n", " ") for line in lines)
    run = ["name = 'own'", "rounds = { count = 6, target = 3 }", "[clients]", "count = 3", "[training]", *lines]
    (tmp_path / "own.toml").write_text("\n".join(run))
    command = [sys.executable, "-m", "umbel", "simulate", "own.toml", "--app", "my_site:make_client", "--json"]
    places = [str(tmp_path), str(ROOT), str(ROOT / "examples" / "flower_quickstart")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "simulate-out" / "rounds.jsonl").read_text().splitlines()]
    assert rows[-1]["accuracy"] > 0.6
