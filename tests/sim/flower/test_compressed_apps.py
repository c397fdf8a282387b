"""Whole Flower apps that compress their replies with two lines, simulated."""

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is in the environment of the Flower tests only (make test)")

from tests.client.flower.projects import WITH_STATE, project
from tests.repository import ROOT
from umbel.aggregation.plans.round import Task
from umbel.sim.federation.rows import Row
from umbel.sim.simulation import simulate

pytestmark = pytest.mark.slow
QUICKSTART = ROOT / "examples" / "flower_quickstart"
STRATEGY = 'FedAvg(fraction_evaluate=context.run_config["fraction-evaluate"])'
CLIENT_LINES = {
    "app = ClientApp()": "app = ClientApp(mods=[compressing])",
    "from flwr.clientapp import ClientApp\n": (
        "from flwr.clientapp import ClientApp\nfrom umbel.client.flower.codec import compressing\n"
    ),
}
SERVER_LINES = {
    STRATEGY: f"Compressed({STRATEGY})",
    "from flwr.serverapp import Grid, ServerApp\n": (
        "from flwr.serverapp import Grid, ServerApp\nfrom umbel.client.flower.codec import Compressed\n"
    ),
}
KEEPS_NOTHING = {'    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")\n': ""}
SERVER = """
import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from umbel.client.flower.codec import Compressed

app = ServerApp()

@app.main()
def main(grid, context):
    arrays = ArrayRecord({"w": Array(np.zeros((2, 3), dtype=np.float32))})
    strategy = STRATEGY
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=3, evaluate_fn=measured)

def measured(server_round, arrays):
    return MetricRecord({"loss": float(arrays["w"].numpy().mean())})
"""


def rewritten(path: Path, lines: dict[str, str]) -> None:
    text = path.read_text()
    for old, new in lines.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)


def quickstart(folder: Path, *, is_compressed: bool) -> Path:
    app = folder / ("compressed" if is_compressed else "plain")
    shutil.copytree(QUICKSTART, app, ignore=shutil.ignore_patterns("__pycache__"))
    if is_compressed:
        rewritten(app / "pytorchexample" / "client_app.py", CLIENT_LINES)
    rewritten(app / "pytorchexample" / "server_app.py", KEEPS_NOTHING | (SERVER_LINES if is_compressed else {}))
    return app


def training(app: Path, clients: int, engine: str = "sequential", **flower: Any) -> list[Row]:
    section = {"app": str(app), "clients": clients, **flower}
    (run,) = simulate({"name": "flowers", "flower": section, "engine": {"name": engine, "workers": 2}}, None).trials
    return [row for row in run.rows if row.task == Task.TRAINING]


def test_the_quickstart_learns_as_well_from_a_tenth_of_the_bytes(tmp_path: Path) -> None:
    config = {"num-server-rounds": 6, "learning-rate": 0.2, "batch-size": 16}
    plain, small = (training(quickstart(tmp_path, is_compressed=one), 3, run_config=config) for one in (False, True))
    assert small[-1].accuracy > plain[-1].accuracy - 0.05 > 0.6  # type: ignore[operator]
    assert sum(row.bytes_up for row in small) < 0.12 * sum(row.bytes_up for row in plain)


def test_both_engines_give_the_same_bits(tmp_path: Path) -> None:
    app = quickstart(tmp_path, is_compressed=True)
    one, two = ([row.model_sha256 for row in training(app, 3, name)] for name in ("sequential", "processes"))
    assert one == two
    assert len({*one}) == 3


@pytest.mark.parametrize("strategy", ["FedAvg(fraction_evaluate=0.0)", "FedAdam(fraction_evaluate=0.0, eta=0.5)"])
def test_mods_and_the_state_of_each_context_last_as_without(tmp_path: Path, strategy: str) -> None:
    own = "from umbel.client.flower.codec import compressing\n\n@app.train(mods=[compressing, noting])"
    client = WITH_STATE.replace("@app.train(mods=[noting])", own)
    small = f"Compressed({strategy}, {{'step': 0.05}})"
    found = [
        training(project(tmp_path / name, app, SERVER.replace("STRATEGY", made)), 4)
        for name, app, made in (("plain", WITH_STATE, strategy), ("small", client, small))
    ]
    assert [[row.train_metrics["calls"] for row in rows] for rows in found] == [[1.0, 2.0, 3.0]] * 2
    losses = [[row.loss for row in rows] for rows in found]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[1] != losses[0], "a codec rounds"
