"""A group of real processes makes the models of the simulator, and so of a coordinator, to the bit.

(`tests/contracts/test_production_and_simulator.py` compares those two.)
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.own_clients import HERE
from tests.suite.nights import at_night
from umbel.sim import simulate

pytestmark = pytest.mark.slow
RANK = Path(__file__).with_name("rank.py")
RUN = """
name = "{name}"
seed = 5
rounds = {{ count = {rounds}, target = {ranks}, minimum = 1, over_selection = 1.0, window_s = 300 }}
training = {{ local_epochs = 2, batch_size = 4, learning_rate = 0.1{training} }}
"""
TERMS = {
    "fedavg": ("", ""),
    "fedprox": (", proximal_mu = 0.05", ""),
    "nesterov": ("", 'aggregation = { optimizer = "nesterov", server_learning_rate = 0.7 }'),
    "adam": ("", 'aggregation = { optimizer = "adam", server_learning_rate = 0.01 }'),
    "integer": ("", 'codec = { name = "integer" }'),
    "topk": ("", 'codec = { name = "topk", share = 0.2, error_feedback = true }'),
    "scaffold": (', algorithm = "scaffold", total_samples = 100', ""),
    "fednova": (', algorithm = "fednova"', ""),
}
MASKED = """
codec = { name = "integer", first_norm = 1.0 }
secure_aggregation = { expected_sample_count = 10 }
"""


def run_file(name: str, n_ranks: int, n_rounds: int) -> str:
    training, other = TERMS[name.removeprefix("masked-")]
    text = RUN.format(name=name, rounds=n_rounds, ranks=n_ranks, training=training) + other
    if name.startswith("masked-"):
        text = text.replace("minimum = 1", "minimum = 3") + MASKED
    return text


def by_group(tasks: list[dict[str, str]], n_ranks: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank has recorded."""
    (folder / "tasks.json").write_text(json.dumps(tasks))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    subprocess.run(
        [*launcher, str(RANK), str(folder / "tasks.json"), str(folder)], env=environment, check=True, timeout=900
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(n_ranks)]


def by_simulator(task: dict[str, str], n_ranks: int) -> list[str | None]:
    """The hash of the model after each round."""
    table = tomllib.loads(task["run_file"])
    table |= {"seeds": [table.pop("seed")], "clients": {"app": task["app"], "count": n_ranks}}
    rows = simulate({**table, "engine": {"name": "sequential"}}).trials[0].rows
    return [row.model_sha256 for row in rows if row.committed]


@pytest.mark.parametrize("n_ranks", [2, *at_night(1, 4)])
def test_a_group_makes_the_models_of_the_simulator(n_ranks: int, tmp_path: Path) -> None:
    names = [*TERMS, *(["masked-fedavg", "masked-adam", "masked-fednova"] if n_ranks >= 3 else [])]
    app = f"{HERE}:make_torch_client"
    tasks = [
        {"name": name, "app": app, "run_file": run_file(name, n_ranks, 20 if n_ranks > 2 else 4)} for name in names
    ]
    by_rank = by_group(tasks, n_ranks, tmp_path)
    for found in by_rank:
        assert found == by_rank[0]
    for task in tasks:
        made = [one["sha256"] for one in by_rank[0][task["name"]]["records"]]
        assert made == by_simulator(task, n_ranks), task["name"]
        assert len(set(made)) == len(made)
