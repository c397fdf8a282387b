"""A client is killed while it trains, and stays away: its round closes seconds later, not when its window is over."""

import signal
from pathlib import Path

import pytest

from tests.contracts.test_client_and_coordinator import Coordinator, coordinator, ends, join, start, umbel
from tests.servers.waits import wait_for_file, wait_until
from umbel.aggregation.run.records import Fate
from umbel.client.operator.operator import Operator

__all__ = ["coordinator"]
pytestmark = pytest.mark.slow
APP = """
import os, time
import torch
from umbel.client import Client, TrainResult
from umbel.client.wire.coordinator import CoordinatorClient

ask = CoordinatorClient.status

def noted(self, *arguments):
    open("watched", "w").close()
    return ask(self, *arguments)

CoordinatorClient.status = noted

class Ward(Client):
    def __init__(self):
        self.model, self.sample_count = torch.nn.Linear(2, 1), 3

    def train(self, model, plan):
        while "STAYS" in os.environ and not plan.should_stop():
            time.sleep(0.02)
        with torch.no_grad():
            model.weight.add_(1.0)
        return TrainResult(3, 2, 2)
"""
RUN = """
name = "wards"
rounds = { count = 1, target = 3, minimum = 2, over_selection = 1.0, window_s = 600 }
"""


def silent_s(operator: Operator, name: str) -> float | None:
    """How long this client has sent no request; 0 while it holds one open."""
    live = operator.progress("wards").live
    return next((one.silent_s for one in live.clients if one.client == name), None) if live else None


@pytest.mark.nightly
def test_a_round_of_600_s_closes_ten_seconds_after_a_client_was_killed(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    for name in ("site", "dead"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ward.py").write_text(APP)
    site, dead = tmp_path / "site", tmp_path / "dead"
    (site / "run.toml").write_text(RUN)
    model = ["--app", "ward:Ward", "--out", "init.safetensors"]
    ends(start("umbel.client.cli.models.model_app", "init", *model, cwd=site))
    umbel(coordinator, "runs.run_app", "create", str(site / "run.toml"), "--model", str(site / "init.safetensors"))
    east, west = (join(coordinator, tmp_path / name, "wards", "ward:Ward", cwd=site) for name in ("east", "west"))
    north = join(coordinator, tmp_path / "north", "wards", "ward:Ward", cwd=dead, STAYS="1")
    wait_for_file(dead / "watched", north)
    with coordinator.operator() as operator:
        wait_until("a status request that is held open", lambda: silent_s(operator, "north") == 0.0)
    north.send_signal(signal.SIGKILL)
    north.communicate()
    for quick in (east, west):
        ends(quick)
    with coordinator.operator() as operator:
        (record,) = operator.progress("wards").ended
    assert (record.committed, record.reported) == (True, 2)
    assert record.reason == "2 reports are in, and north fell silent"
    (lost,) = [one for one in record.clients if one.fate is Fate.LOST]
    assert lost.client == "north"
