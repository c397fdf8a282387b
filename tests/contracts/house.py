"""A coordinator process that a test kills and starts again."""

import json
import subprocess
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from tests.contracts.test_client_and_coordinator import start
from tests.servers.waits import LIMIT_S, wait_for_file
from umbel.client import Operator
from umbel.client.cli.runs import run_app


class House:
    """A coordinator process that can be killed and started again at the same address."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.port = "0"
        self.process = self._start()
        self.url = (data / "endpoint").read_text().strip()
        self.port = self.url.rpartition(":")[2]

    def _start(self) -> "subprocess.Popen[str]":
        (self.data / "endpoint").unlink(missing_ok=True)
        arguments = ["--data", str(self.data), "--port", self.port, "--log-level", "warning"]
        process = start("umbel.server.serve.commands.serve", *arguments)
        wait_for_file(self.data / "endpoint", process)
        return process

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def restart(self) -> None:
        self.kill()
        self.process = self._start()

    def stop(self) -> None:
        """End the coordinator as its operator does."""
        self.process.terminate()
        self.process.communicate(timeout=LIMIT_S)

    def operator(self) -> Operator:
        return Operator(self.url, (self.data / "admin.key").read_text().strip())

    def umbel(self, *arguments: str) -> Result:
        env = {"UMBEL_ADMIN_KEY": (self.data / "admin.key").read_text().strip(), "UMBEL_SERVER": self.url}
        return CliRunner(env=env).invoke(run_app, list(arguments))

    def told(self, *arguments: str) -> Any:
        result = self.umbel(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)
