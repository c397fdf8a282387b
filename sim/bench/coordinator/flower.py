"""The peer of `umbel bench coordinator`: Flower's deployment engine, as its users run it.

A SuperLink and SuperNodes, each a process of the interpreter that has `flwr` installed, and a Flower app that does no
work. The app writes the time whenever a round begins. Written for flwr 1.41.
"""

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from umbel.sim.bench.report import BenchFailed

PUBLISHED_ROUND_S = 6.7
_LIMIT_S = 420.0

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


class Timed(FedAvg):
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
    strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
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
    if not (python.parent / "flower-superlink").exists():
        raise BenchFailed(f"no flower-superlink beside {python}; install flwr there, or leave out --peer-python")
    with tempfile.TemporaryDirectory(prefix="umbel-flower-") as folder:
        return _Deployment(python.absolute().parent, Path(folder), n_nodes, n_rounds).round_s()


class _Deployment:
    """One SuperLink, its SuperNodes and one run of the app. Each leads a process group, killed at the end."""

    def __init__(self, binaries: Path, folder: Path, n_nodes: int, n_rounds: int) -> None:
        self._binaries, self._folder, self._n_nodes, self._n_rounds = binaries, folder, n_nodes, n_rounds
        self._times = folder / "times.txt"
        self._processes: list[subprocess.Popen[bytes]] = []
        path = f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}"
        self._environment = {**os.environ, "PATH": path, "FLWR_HOME": str(folder), "FLWR_TELEMETRY_ENABLED": "0"}

    def round_s(self) -> float:
        self._write_app()
        try:
            self._start_processes()
            self._submit()
            return self._wait()
        finally:
            self._kill()

    def _write_app(self) -> None:
        package = self._folder / "app" / "zerowork"
        package.mkdir(parents=True)
        (package.parent / "pyproject.toml").write_text(_PYPROJECT)
        (package.parent / "LICENSE").write_text("Apache-2.0\n")
        (package / "__init__.py").touch()
        (package / "server_app.py").write_text(_SERVER_APP)
        (package / "client_app.py").write_text(_CLIENT_APP)

    def _start_processes(self) -> None:
        ports = _free_ports(self._n_nodes + 1)
        link = f"127.0.0.1:{ports[0]}"
        connection = f'[superlink]\ndefault = "bench"\n[superlink.bench]\naddress = "{link}"\ninsecure = true\n'
        (self._folder / "config.toml").write_text(connection)
        no_install = "--disable-runtime-dependency-installation"
        self._start("flower-superlink", "--insecure", no_install, "--port", str(ports[0]))
        _wait_for_port(ports[0])
        for port in ports[1:]:
            self._start("flower-supernode", "--insecure", "--superlink", link, "--port", str(port))

    def _start(self, program: str, *arguments: str) -> None:
        with (self._folder / "flower.log").open("ab") as log:
            process = subprocess.Popen(
                [str(self._binaries / program), *arguments],
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=self._folder,
                start_new_session=True,
            )
        self._processes.append(process)

    def _submit(self) -> None:
        config = f"rounds={self._n_rounds + 1} nodes={self._n_nodes} times='{self._times}'"
        command = [str(self._binaries / "flwr"), "run", "app", "bench", "--run-config", config]
        done = subprocess.run(
            command, env=self._environment, cwd=self._folder, capture_output=True, timeout=_LIMIT_S, check=False
        )
        if done.returncode:
            raise BenchFailed(f"flwr run failed:\n{done.stdout.decode(errors='replace')[-2000:]}")

    def _wait(self) -> float:
        deadline = time.monotonic() + _LIMIT_S
        while not (self._times.exists() and "done" in self._times.read_text()):
            if time.monotonic() > deadline:
                log = (self._folder / "flower.log").read_text(errors="replace")
                raise BenchFailed(f"Flower's rounds did not finish within {_LIMIT_S:.0f} s:\n{log[-2000:]}")
            time.sleep(0.2)
        times = [float(line.split()[0]) for line in self._times.read_text().splitlines()]
        return statistics.median(later - earlier for earlier, later in pairwise(times[1:]))

    def _kill(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):  # what it started itself is in its group
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


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
