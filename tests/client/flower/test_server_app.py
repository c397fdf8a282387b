"""The first model is what a ServerApp sends to the first clients that train."""

import textwrap
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is in the environment of the Flower tests only (make test)")

from tests.client.flower.projects import SERVES, TRAINS, project
from umbel.client.errors import AppError
from umbel.client.flower.process import AppProcess
from umbel.client.flower.project import read_project

pytestmark = pytest.mark.slow
LEGACY = """
import numpy as np
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

def server_fn(context):
    {first}
    config = lambda number: {{"lr": 0.5, "round": number}}
    strategy = FedAvg(initial_parameters=first, on_fit_config_fn=config, min_available_clients=9)
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=3))

app = ServerApp(server_fn=server_fn)
"""
OWN_MAIN = """
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    nodes = list(grid.get_node_ids())
    asked = [Message(RecordDict(), node, "query") for node in nodes[:3]]
    assert all(reply.has_error() for reply in grid.send_and_receive(asked))
    arrays = ArrayRecord({"w": Array(np.ones(2, dtype=np.float32))})
    content = RecordDict({"model": arrays, "c": ConfigRecord({"a": 1})})
    replies = grid.pull_messages(grid.push_messages([Message(content, node, "train.mine") for node in nodes[:2]]))
"""
GIVES_PARAMETERS = """
import numpy as np
from flwr.client import ClientApp, NumPyClient

class Client(NumPyClient):
    def get_parameters(self, config):
        return [np.full(3, 2.0, dtype=np.float32), np.zeros((), dtype=np.int64)]

app = ClientApp(client_fn=lambda context: Client().to_client())
"""


def process_of(folder: Path, server: str, client: str = TRAINS, run_config: str = "") -> AppProcess:
    return AppProcess(read_project(str(project(folder, client, server)), run_config), {})


def test_a_strategys_initial_arrays_and_what_it_tells_clients(tmp_path: Path) -> None:
    first = process_of(tmp_path, SERVES, run_config="model.width=5").first_message()
    assert {name: one.shape for name, one in first.arrays.items()} == {"w": (2, 5)}
    assert first.config == {"lr": 0.25, "momentum": 0.9, "server-round": 1}


def test_a_main_of_its_own_may_ask_nodes_before_it_trains(tmp_path: Path) -> None:
    first = process_of(tmp_path, OWN_MAIN).first_message()
    assert np.array_equal(first.arrays["w"], np.ones(2))
    assert first.config == {"a": 1}


def test_a_legacy_strategy_with_initial_parameters(tmp_path: Path) -> None:
    server = LEGACY.format(first="first = ndarrays_to_parameters([np.ones((2, 2), dtype=np.float32)])")
    first = process_of(tmp_path, server).first_message()
    assert {name: one.shape for name, one in first.arrays.items()} == {"0": (2, 2)}
    assert first.config == {"lr": 0.5, "round": 1}


def test_a_legacy_strategy_that_asks_a_client_for_the_parameters(tmp_path: Path) -> None:
    first = process_of(tmp_path, LEGACY.format(first="first = None"), GIVES_PARAMETERS).first_message()
    assert [*first.arrays] == ["0", "1"]
    assert np.array_equal(first.arrays["0"], np.full(3, 2.0))
    assert first.arrays["1"].shape == ()


def test_equal_seeds_give_equal_models(tmp_path: Path) -> None:
    server = SERVES.replace(
        'np.full((2, context.run_config["model.width"]), 3.0, dtype=np.float32)', "np.random.rand(4)"
    )
    models = [process_of(tmp_path / f"{n}", server).first_message(seed) for n, seed in enumerate((1, 1, 2))]
    assert np.array_equal(models[0].arrays["w"], models[1].arrays["w"])
    assert not np.array_equal(models[0].arrays["w"], models[2].arrays["w"])


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (
            textwrap.dedent("""
            from flwr.serverapp import ServerApp
            app = ServerApp()
            @app.main()
            def main(grid, context):
                pass
         """),
            "ended without a message that asks clients to train",
        ),
        ("raise RuntimeError('no disk')", "RuntimeError: no disk"),
        ("app = 1", "it must be a flwr ServerApp"),
    ],
)
def test_a_server_app_without_a_first_model_is_told(tmp_path: Path, server: str, words: str) -> None:
    with pytest.raises(AppError, match=words):
        process_of(tmp_path, server).first_message()


def test_the_class_of_the_strategy_is_told(tmp_path: Path) -> None:
    own = SERVES.replace("FedAvg(", "Mine(").replace(
        "app = ServerApp()", "class Mine(FedAvg): ...\n\napp = ServerApp()"
    )
    legacy = LEGACY.format(first="first = ndarrays_to_parameters([np.ones(2, dtype=np.float32)])")
    found = [
        process_of(tmp_path / name, server).first_message().strategy
        for name, server in {"plain": SERVES, "own": own, "legacy": legacy, "main": OWN_MAIN}.items()
    ]
    assert found == [
        "flwr.serverapp.strategy.fedavg.FedAvg",
        "small.server_app.Mine",
        "flwr.server.strategy.fedavg.FedAvg",
        "",
    ]
