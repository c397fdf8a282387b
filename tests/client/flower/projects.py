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

NUMPY_CLIENT = """
import numpy as np
from flwr.client import ClientApp, NumPyClient

class Mean(NumPyClient):
    '''Learns the mean of its own numbers.'''

    def __init__(self, number):
        self.numbers = np.full(8, float(number), dtype=np.float32)

    def fit(self, parameters, config):
        moved = [one + config["lr"] * (self.numbers.mean() - one) for one in parameters]
        return moved, len(self.numbers), {"lr": config["lr"]}

    def evaluate(self, parameters, config):
        return float(abs(parameters[0] - 1.0).max()), len(self.numbers), {"value": float(parameters[0].mean())}

app = ClientApp(client_fn=lambda context: Mean(context.node_config["partition-id"]).to_client())
"""
NUMPY_SERVER = """
import numpy as np
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

def server_fn(context):
    first = ndarrays_to_parameters([np.full(4, 9.0, dtype=np.float32), np.zeros((2, 2), dtype=np.float32)])
    strategy = FedAvg(initial_parameters=first, on_fit_config_fn=lambda server_round: {"lr": 0.1})
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=3))

app = ServerApp(server_fn=server_fn)
"""
WITH_STATE = """
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

def noting(message, context, call_next):
    '''A mod that says how often it was called, over all rounds and restarts.'''
    n = int(context.state["calls"]["n"]) + 1 if "calls" in context.state else 1
    context.state["calls"] = ConfigRecord({"n": n})
    reply = call_next(message, context)
    reply.content["metrics"]["calls"] = n
    return reply

app = ClientApp()

@app.train(mods=[noting])
def train(message, context):
    arrays = {name: Array(one.numpy() + 1) for name, one in message.content["arrays"].items()}
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 10})})
    return Message(content=content, reply_to=message)
"""
OWN_STRATEGY = """
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import Strategy

class Median(Strategy):
    '''Asks every node, and takes the median of each value.'''

    def configure_train(self, server_round, arrays, config, grid):
        config["server-round"] = server_round
        content = RecordDict({"arrays": arrays, "config": config})
        return [Message(content, node, MessageType.TRAIN) for node in grid.get_node_ids()]

    def aggregate_train(self, server_round, replies):
        found = [reply.content["arrays"] for reply in replies if reply.has_content()]
        medians = {name: np.median([one[name].numpy() for one in found], axis=0) for name in found[0]}
        arrays = ArrayRecord({name: Array(one.astype(np.float32)) for name, one in medians.items()})
        return arrays, MetricRecord({"n": len(found)})

    def configure_evaluate(self, server_round, arrays, config, grid):
        return []

    def aggregate_evaluate(self, server_round, replies):
        return None

    def summary(self):
        pass

app = ServerApp()

@app.main()
def main(grid, context):
    arrays = ArrayRecord({"w": Array(np.full((2, context.run_config["model.width"]), 3.0, dtype=np.float32))})
    Median().start(grid=grid, initial_arrays=arrays, num_rounds=2)
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
