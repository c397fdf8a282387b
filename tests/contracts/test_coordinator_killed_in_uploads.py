"""kill -9 of the coordinator while a client uploads over a slow link: the client ends with the cause if it was told to
give up, and otherwise continues the upload when the coordinator is back.
"""

import json
import math
import select
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import save_file

from tests.contracts.house import House
from tests.contracts.test_client_and_coordinator import ends, fails, start
from tests.servers.waits import wait_until

pytestmark = pytest.mark.slow

HEIGHT = 500
UPDATE_BYTES = 4 * 1000 * HEIGHT
BYTES_PER_S = 1_000_000
APP = f"""
import torch
from umbel.client import Client, TrainResult

class Heavy(Client):
    def __init__(self):
        self.model, self.sample_count = torch.nn.Linear(1000, {HEIGHT}, bias=False), 1

    def train(self, model, plan):
        open("trained", "a").write(".")
        with torch.no_grad():
            model.weight.add_(torch.randn({HEIGHT}, 1000))
        return TrainResult(1, 1, 1)
"""
RUN = """
name = "heavy"
rounds = { count = 1, target = 1, minimum = 1, over_selection = 1.0, window_s = 60 }
"""


class SlowLink(socketserver.ThreadingTCPServer):
    """Carries connections to a coordinator, at `BYTES_PER_S` each way. `n_up`: the bytes that it has carried
    there; `n_up_max`: it waits after this many.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int) -> None:
        self.n_up, self.n_up_max = 0, math.inf
        self._there = port
        super().__init__(("127.0.0.1", 0), _Carrier)

    @property
    def url(self) -> str:
        host, port = cast(tuple[str, int], self.server_address)
        return f"http://{host}:{port}"

    def carry(self, here: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self._there)) as there:
            while True:
                for one in select.select([here, there], [], [])[0]:
                    if not (piece := one.recv(1 << 14)):
                        return
                    time.sleep(len(piece) / BYTES_PER_S)
                    if one is here:
                        while self.n_up >= self.n_up_max:
                            time.sleep(0.01)
                        self.n_up += len(piece)
                    (there if one is here else here).sendall(piece)


class _Carrier(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with suppress(OSError):  # the coordinator is dead, or the client has left
            cast(SlowLink, self.server).carry(self.request)


@contextmanager
def begun(folder: Path) -> Generator[tuple[House, SlowLink]]:
    """A coordinator with the run, behind a slow link."""
    (folder / "heavy.py").write_text(APP)
    save_file({"weight": torch.zeros(HEIGHT, 1000)}, folder / "init.safetensors")
    (folder / "run.toml").write_text(RUN)
    house = House(folder / "coordinator")
    with SlowLink(int(house.port)) as link:
        threading.Thread(target=link.serve_forever, args=(0.05,), daemon=True).start()
        try:
            house.told("create", str(folder / "run.toml"), "--model", str(folder / "init.safetensors"))
            yield house, link
        finally:
            link.shutdown()
            house.stop()


def joined(link: SlowLink, folder: Path, token: str, *more: str) -> "subprocess.Popen[str]":
    words = ["--server", link.url, "--app", "heavy:Heavy", "--run", "heavy", "--state", str(folder / "ward"), "--json"]
    return start("umbel.client.cli.site.join", *words, "--name", "ward", *more, cwd=folder, UMBEL_TOKEN=token)


def kill_in_upload(house: House, link: SlowLink) -> None:
    wait_until("a third of the update", lambda: link.n_up >= link.n_up_max)
    house.kill()
    link.n_up_max = math.inf


def test_a_client_gives_up_with_the_cause_and_without_the_option_continues_the_upload(tmp_path: Path) -> None:
    with begun(tmp_path) as (house, link):
        with house.operator() as operator:
            (token,) = operator.create_tokens()
        link.n_up_max = UPDATE_BYTES // 3
        client = joined(link, tmp_path, token, "--give-up-after", "2")
        kill_in_upload(house, link)
        *_, last = fails(client).splitlines()
        assert "the coordinator has given no usable answer for 2 s" in last
        host = link.url.removeprefix("http://")
        assert f"The last request failed: no answer from the coordinator at {host}: " in last

        house.restart()
        link.n_up_max = link.n_up + UPDATE_BYTES // 3
        client = joined(link, tmp_path, token)
        kill_in_upload(house, link)
        assert client.stderr is not None
        next(line for line in client.stderr if "trying again (try" in line)
        house.restart()
        end = json.loads(ends(client))
        assert (end["status"], end["accepted"]) == ("finished", 1)
        assert link.n_up < 1.5 * UPDATE_BYTES, "what has arrived is not sent again"
    assert (tmp_path / "trained").read_text() == ".", "it has trained once"
