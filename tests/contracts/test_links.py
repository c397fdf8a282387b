"""A slow and broken link, a real one: shaped, reset at random, unplugged; between real processes in two namespaces."""

import json
import random
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.contracts.two_hosts import COORDINATOR_IP, PORT, Incident, Meter, TwoHosts, two_hosts, why_not
from tests.servers.waits import LIMIT_S, wait_for_file
from umbel.client.wire.timing import chunk_bytes

_WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)
URL = f"http://{COORDINATOR_IP}:{PORT}"
WIDTH = 1000
HEADERS = 1514 / 1448  # what a full packet has on the wire, over what it carries
CONTROL_BYTES = 300_000  # check-ins, polls, reports, connections

APP = """
import os, time
import torch
from umbel.client import Client, TrainResult

class Heavy(Client):
    def __init__(self):
        self.model, self.sample_count = torch.nn.Linear(1000, int(os.environ["HEIGHT"]), bias=False), 1

    def train(self, model, plan):
        open("training", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.02)
        with torch.no_grad():
            model.weight.add_(2.0**-10)
        return TrainResult(1, 1, 1)
"""
RUN = """
name = "heavy"
rounds = {{ count = 1, target = 1, over_selection = 1.0, window_s = {window_s} }}
"""


@dataclass(frozen=True)
class Case:
    """A link of so many Mbit/s, and what happens on it while an update of so many values is sent."""

    mbit_s: float
    n_values: int
    window_s: float
    n_cuts: int
    outage_s: float
    deadline_s: float

    @property
    def update_bytes(self) -> int:
        return 4 * self.n_values + 64

    @property
    def bytes_per_s(self) -> float:
        return self.mbit_s * 1e6 / 8

    def bytes_at_most(self, n_cuts: int) -> float:
        """What may cross the wire: the update once, and a chunk for each cut and for the outage."""
        chunk = chunk_bytes(self.bytes_per_s, self.window_s)
        return HEADERS * (self.update_bytes + (n_cuts + 1) * chunk) + CONTROL_BYTES


FAST = Case(mbit_s=100, n_values=5_000_000, window_s=60, n_cuts=3, outage_s=3, deadline_s=LIMIT_S)
SLOW = Case(mbit_s=10, n_values=50_000_000, window_s=400, n_cuts=8, outage_s=30, deadline_s=400)


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as hosts:
        yield hosts


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("case", [FAST, pytest.param(SLOW, marks=pytest.mark.nightly)], ids=["fast", "slow"])
def test_a_cut_costs_a_chunk_and_an_outage_no_round(hosts: TwoHosts, tmp_path: Path, case: Case) -> None:
    with coordinator(hosts, tmp_path) as (pid, token, key):
        create_run(hosts, tmp_path, key, case)
        join = ["join", "--server", URL, "--app", "heavy:Heavy", "--run", "heavy", "--state", "state", "--json"]
        site = hosts.client.umbel(*join, cwd=tmp_path, UMBEL_TOKEN=token, HEIGHT=str(case.n_values // WIDTH))
        try:
            wait_for_file(tmp_path / "training", site, tmp_path / "join.log")
            hosts.shape(case.mbit_s)  # after the download, which is not what is measured
            meter = Meter(pid, incidents(hosts, case))
            with meter.running():
                (tmp_path / "go").touch()
                out, _ = site.communicate(timeout=case.deadline_s)
        finally:
            site.kill()
            site.wait()
    assert site.returncode == 0, (tmp_path / "join.log").read_text()
    end = json.loads(out)
    assert (end["status"], end["accepted"]) == ("finished", 1), (tmp_path / "join.log").read_text()
    tell(case, hosts, meter)
    assert hosts.n_cuts == case.n_cuts
    assert case.update_bytes < meter.n_bytes <= case.bytes_at_most(hosts.n_cuts)


def incidents(hosts: TwoHosts, case: Case) -> list[Incident]:
    """Resets at random bytes of the update's second to last tenths; the outage at its middle."""
    draw = random.Random(3)
    places = sorted(draw.uniform(0.1, 0.95) for _ in range(case.n_cuts))
    cuts: list[Incident] = [(int(place * case.update_bytes), hosts.cut) for place in places]
    return sorted([*cuts, (case.update_bytes // 2, lambda: hosts.unplug(case.outage_s))], key=lambda it: it[0])


def tell(case: Case, hosts: TwoHosts, meter: Meter) -> None:
    """The figures of docs/explanation/results/coordinator.md; `pytest -s` shows them."""
    working_s = meter.busy_s() - case.outage_s
    facts = {
        "mbit_s": case.mbit_s,
        "update_mb": case.update_bytes / 1e6,
        "cuts": hosts.n_cuts,
        "outage_s": case.outage_s,
        "wire_mb": meter.n_bytes / 1e6,
        "wire_over_update": meter.n_bytes / case.update_bytes,
        "seconds_outside_the_outage": working_s,
        "goodput_over_rate": case.update_bytes / working_s / case.bytes_per_s,
        "goodput_over_payload_rate": HEADERS * case.update_bytes / working_s / case.bytes_per_s,
    }
    print(json.dumps({name: round(value, 3) for name, value in facts.items()}))


@contextmanager
def coordinator(hosts: TwoHosts, folder: Path) -> Generator[tuple[int, str, Path]]:
    """A coordinator on its host: its process, a token, and where its admin key is."""
    serve = ["serve", "--data", "data", "--host", COORDINATOR_IP, "--port", str(PORT)]
    process = hosts.coordinator.umbel(*serve, cwd=folder)
    try:
        wait_for_file(folder / "data" / "endpoint", process, folder / "serve.log")
        key = folder / "data" / "admin.key"
        yield process.pid, operate(hosts, folder, key, "token", "create")["tokens"][0], key
    finally:
        process.terminate()
        process.communicate(timeout=LIMIT_S)


def create_run(hosts: TwoHosts, folder: Path, key: Path, case: Case) -> None:
    (folder / "heavy.py").write_text(APP)
    (folder / "run.toml").write_text(RUN.format(window_s=case.window_s))
    save_file({"weight": torch.zeros(case.n_values // WIDTH, WIDTH)}, folder / "init.safetensors")
    operate(hosts, folder, key, "run", "create", "run.toml", "--model", "init.safetensors")


def operate(hosts: TwoHosts, folder: Path, key: Path, *command: str) -> Any:
    where = ["--server", URL, "--admin-key-file", str(key), "--json"]
    process = hosts.coordinator.umbel(*command, *where, cwd=folder)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, (folder / f"{command[0]}.log").read_text()
    return json.loads(out)
