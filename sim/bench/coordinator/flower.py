"""The peer of `umbel bench coordinator`: Flower's deployment engine, as its users run it.

A SuperLink and SuperNodes, each a process of the interpreter that has `flwr` installed, and a Flower app that does no
work. The app writes the time whenever a round begins. Written for flwr 1.41.
"""

import socket
import statistics
import subprocess
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from umbel.sim.bench.peer_process import log_tail, started
from umbel.sim.bench.report import BenchFailed

PUBLISHED_ROUND_S = 6.7
_LIMIT_S = 420.0
_NO_INSTALL = "--disable-runtime-dependency-installation"
_TIMES_FILE = "times.txt"

_PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "zerowork"
version = "1.0.0"
description = "Rounds without work"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41"]
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "umbel"
fab-format-version = 1
flwr-version-target = "1.41.0"
[tool.flwr.app.components]
serverapp = "zerowork.server_app:app"
clientapp = "zerowork.client_app:app"
[tool.flwr.app.config]
rounds = 1
nodes = 1
times = ""
"""
_SERVER_APP = """
import time
import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class NotedFedAvg(FedAvg):
    times = ""

    def configure_train(self, *args, **kwargs):
        self.note()
        return super().configure_train(*args, **kwargs)

    def note(self, word=""):
        with open(self.times, "a") as file:
            file.write(f"{time.time()}{word}\\n")


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    nodes = int(config["nodes"])
    strategy = NotedFedAvg(
        fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes
    )
    strategy.times = str(config["times"])
    arrays = ArrayRecord([np.zeros(10, np.float32)])
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=int(config["rounds"]))
    strategy.note(" done")
"""
_CLIENT_APP = """
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    content = RecordDict({"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})})
    return Message(content=content, reply_to=message)
"""


def flower_round_s(python: Path, n_nodes: int, n_rounds: int) -> float:
    """Median seconds from one round's beginning to the next one's, the first round (start-up) left out."""
    binaries = python.absolute().parent
    if not (binaries / "flower-superlink").exists():
        raise BenchFailed(
            f"there is no flower-superlink beside {python}; install flwr there, or leave out --peer-python"
        )
    with tempfile.TemporaryDirectory(prefix="umbel-flower-", ignore_cleanup_errors=True) as name, ExitStack() as stack:
        folder = Path(name)

        def start(program: str, *arguments: str) -> "subprocess.Popen[bytes]":
            return stack.enter_context(started([str(binaries / program), *arguments], folder))

        link, *nodes = _free_ports(1 + n_nodes)
        _write_app(folder, link)
        start("flower-superlink", "--insecure", _NO_INSTALL, "--port", str(link))
        _wait_for_port(link)
        for port in nodes:
            address = f"127.0.0.1:{link}"
            start("flower-supernode", "--insecure", "--superlink", address, "--port", str(port))
        config = f"rounds={n_rounds + 1} nodes={n_nodes} times='{folder / _TIMES_FILE}'"
        if start("flwr", "run", "app", "bench", "--run-config", config).wait(_LIMIT_S):
            raise BenchFailed(f"flwr run failed{log_tail(folder)}")
        times = _times(folder)
    return statistics.median(later - earlier for earlier, later in pairwise(times[1:]))


def _write_app(folder: Path, link: int) -> None:
    """Write the app, and the address of the SuperLink for `flwr run`."""
    package = folder / "app" / "zerowork"
    package.mkdir(parents=True)
    (package.parent / "pyproject.toml").write_text(_PYPROJECT)
    (package.parent / "LICENSE").write_text("Apache-2.0\n")
    (package / "__init__.py").touch()
    (package / "server_app.py").write_text(_SERVER_APP)
    (package / "client_app.py").write_text(_CLIENT_APP)
    connection = f'[superlink]\ndefault = "bench"\n[superlink.bench]\naddress = "127.0.0.1:{link}"\ninsecure = true\n'
    (folder / "config.toml").write_text(connection)


def _times(folder: Path) -> list[float]:
    """Wait for the app to be done; when its rounds began, and when it ended."""
    path, deadline = folder / _TIMES_FILE, time.monotonic() + _LIMIT_S
    while not (path.exists() and "done" in path.read_text()):
        if time.monotonic() > deadline:
            raise BenchFailed(f"Flower's rounds did not finish within {_LIMIT_S:.0f} s{log_tail(folder)}")
        time.sleep(0.2)
    return [float(line.split()[0]) for line in path.read_text().splitlines()]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(listener.getsockname()[1]) for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise BenchFailed("the SuperLink did not start within 60 s") from error
            time.sleep(0.2)
