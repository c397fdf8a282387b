"""Folders with small Flower apps."""

import textwrap
from pathlib import Path

_PYPROJECT = """
[project]
name = "small"
version = "1.0.0"
[tool.flwr.app]
publisher = "test"
[tool.flwr.app.components]
serverapp = "small.server_app:app"
clientapp = "small.client_app:app"
[tool.flwr.app.config]
epochs = 1
model.width = 4
name = "small"
"""
TRAINS = """
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    arrays = {name: Array(one.numpy() + 1) for name, one in message.content["arrays"].items()}
    metrics = {"num-examples": 10 + context.node_config.get("partition-id", 0)}
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=message)
"""
SERVES = """
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()

@app.main()
def main(grid, context):
    arrays = ArrayRecord({"w": Array(np.full((2, context.run_config["model.width"]), 3.0, dtype=np.float32))})
    FedAvg(min_available_nodes=500).start(
        grid=grid, initial_arrays=arrays, num_rounds=2, train_config=ConfigRecord({"lr": 0.25, "momentum": 0.9})
    )
    raise AssertionError("nobody trains, so this is never reached")
"""


def project(folder: Path, client: str = TRAINS, server: str = SERVES) -> Path:
    """A Flower app with this code in `folder`."""
    package = folder / "small"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(_PYPROJECT)
    (package / "__init__.py").touch()
    (package / "client_app.py").write_text(textwrap.dedent(client))
    (package / "server_app.py").write_text(textwrap.dedent(server))
    return folder
