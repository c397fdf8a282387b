"""A Flower app whose strategy umbel takes the place of."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is in the environment of the Flower tests only (make test)")

from tests.client.flower.projects import NUMPY_CLIENT, NUMPY_SERVER, TRAINS, WITH_STATE, project
from tests.repository import ROOT
from tests.sim.flower.test_trial import EVALUATES, MEASURES, ONE_ROUND, OWN_LOOP, simulated, training
from umbel.sim.flower.native import native_experiment
from umbel.sim.results.results import Results
from umbel.sim.simulation import simulate

pytestmark = pytest.mark.slow
QUICKSTART = ROOT / "examples" / "flower_quickstart"


def table_of(app: Path, clients: int = 4, **sections: Any) -> dict[str, Any]:
    section = {"app": str(app), "clients": clients, **sections.pop("flower", {})}
    return native_experiment({"name": "flowers", "flower": section, **sections}, Path())


def native(app: Path, out: Path | None = None, clients: int = 4, **sections: Any) -> Results:
    return simulate(table_of(app, clients, **sections), out)


def test_the_run_is_what_the_strategy_says(tmp_path: Path) -> None:
    server = ONE_ROUND.replace("fraction_evaluate=0.0", "proximal_mu=0.5, fraction_train=0.6, fraction_evaluate=0.3")
    server = server.replace("num_rounds=1", 'num_rounds=7, train_config=ConfigRecord({"lr": 0.25, "depth": 2})')
    server = server.replace("FedAvg", "FedProx")
    table = table_of(project(tmp_path / "app", TRAINS, server), 10, codec={"name": "eden"}, rounds={"window_s": 60.0})
    assert table["rounds"] == {"count": 7, "target": 6, "over_selection": 1.0, "window_s": 60.0}
    assert table["training"] == {"options": {"lr": 0.25, "depth": 2}, "proximal_mu": 0.5}
    assert (table["clients"]["count"], table["clients"]["test_clients"]) == (10, 3)
    assert table["codec"] == {"name": "eden"}


def test_umbels_rounds_make_the_models_that_flowers_strategy_makes(tmp_path: Path) -> None:
    app = project(
        tmp_path / "app",
        TRAINS + EVALUATES,
        MEASURES.replace(", evaluate_fn=measured", "").replace("fraction_evaluate=0.0, ", ""),
    )
    one, two = training(simulated(app)), training(native(app))
    assert [row.accuracy for row in one] == pytest.approx([0.1, 0.2, 0.3])
    assert [row.accuracy for row in two] == pytest.approx([0.1, 0.2, 0.3])
    assert [row.sample_count for row in one] == [row.sample_count for row in two]


@pytest.mark.parametrize(
    ("strategy", "keys"),
    [
        (
            "FedAdam(eta=0.5, beta_1=0.8, beta_2=0.95, tau=0.01, ",
            {
                "optimizer": "adam",
                "server_learning_rate": 0.5,
                "beta1": 0.8,
                "beta2": 0.95,
                "tau": 0.01,
                "bias_correction": True,
                "bias_correction_from": 2,
            },
        ),
        (
            "FedYogi(eta=0.5, tau=0.01, ",
            {"optimizer": "yogi", "server_learning_rate": 0.5, "beta1": 0.9, "beta2": 0.99, "tau": 0.01, "v0": 0.0},
        ),
        (
            "FedAdagrad(tau=0.01, ",
            {"optimizer": "adagrad", "server_learning_rate": 0.1, "beta1": 0.0, "tau": 0.01, "v0": 0.0},
        ),
        (
            "FedAvgM(server_learning_rate=0.5, server_momentum=0.75, ",
            {"optimizer": "momentum", "server_learning_rate": 0.5, "momentum": 0.75},
        ),
        ("FedAvgM(server_learning_rate=0.5, ", {"optimizer": "sgd", "server_learning_rate": 0.5}),
        ("FedAvgM(", None),
    ],
)
def test_the_step_of_the_server_is_that_of_flowers_strategy(
    tmp_path: Path, strategy: str, keys: dict[str, Any] | None
) -> None:
    server = MEASURES.replace(", evaluate_fn=measured", "").replace("fraction_evaluate=0.0, ", "")
    server = server.replace("FedAvg(", strategy).replace("import FedAvg", f"import {strategy.partition('(')[0]}")
    app = project(tmp_path / "app", TRAINS + EVALUATES, server)
    assert table_of(app).get("aggregation") == keys
    theirs, ours = ([row.accuracy for row in training(run(app))] for run in (simulated, native))
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert None not in theirs
    assert len(set(theirs)) == 3


@pytest.mark.parametrize("engine", ["sequential", "processes"])
def test_the_quickstart_learns_masked_and_an_ended_run_is_read_again(tmp_path: Path, engine: str) -> None:
    flower = {"run_config": {"num-server-rounds": 6, "learning-rate": 0.2, "batch-size": 16}}
    secure = {"metrics": "all"}
    asked: dict[str, Any] = {"flower": flower, "secure_aggregation": secure, "engine": {"name": engine}}
    results = native(QUICKSTART, tmp_path / "out", 4, **asked)
    rows = training(results)
    assert rows[-1].accuracy > 0.5, "ten digits, so 0.1 without training"  # type: ignore[operator]
    assert all(row.committed for row in rows)
    again = native(QUICKSTART, tmp_path / "out", 4, **asked)
    assert [row.model_sha256 for row in training(again)] == [row.model_sha256 for row in rows]


def test_the_server_app_measures_the_models(tmp_path: Path) -> None:
    rows = training(native(project(tmp_path / "app", TRAINS, MEASURES)))
    assert [row.accuracy for row in rows] == pytest.approx([0.1, 0.2, 0.3])
    assert [row.loss for row in rows] == pytest.approx([9.0, 8.0, 7.0])


def test_the_state_of_each_context_lasts_over_rounds(tmp_path: Path) -> None:
    app = project(tmp_path / "app", WITH_STATE, ONE_ROUND.replace("num_rounds=1", "num_rounds=3"))
    assert [row.train_metrics["calls"] for row in training(native(app))] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (OWN_LOOP, "sends messages before it starts a strategy"),
        (NUMPY_SERVER, "strategy is of Flower's older API"),
        (
            ONE_ROUND.replace("FedAvg", "FedMedian"),
            "strategy is flwr.serverapp.strategy.fedmedian.FedMedian, and umbel's",
        ),
        (ONE_ROUND.replace("min_train_nodes=1", "min_train_nodes=9"), "waits for 9 nodes, and there are 4"),
        (ONE_ROUND.replace("min_train_nodes=1", "weighted_by_key='loss'"), "sets weighted_by_key, which umbel's own"),
        (ONE_ROUND.replace("    arrays =", "    1 / 0\n    arrays =", 1), "failed with ZeroDivisionError"),
    ],
)
def test_what_umbel_cannot_do_by_itself_is_refused(tmp_path: Path, server: str, reason: str) -> None:
    client = NUMPY_CLIENT if server is NUMPY_SERVER else TRAINS
    with pytest.raises(ValueError, match=reason):
        native(project(tmp_path / "app", client, server))


def test_the_command_runs_it_natively(tmp_path: Path) -> None:
    app = project(tmp_path / "app", TRAINS + EVALUATES, ONE_ROUND.replace("num_rounds=1", "num_rounds=2"))
    command = [sys.executable, "-m", "umbel", "simulate", "--flower-app", str(app), "--native", "--json"]
    done = subprocess.run(
        [*command, "--set", "codec.name=eden", "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "experiment.json").read_text())["codec"] == {"name": "eden"}
