"""No small secure run begins without a site that is up, however slowly its sites come on a busy machine."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.contracts.house import House
from tests.servers.waits import LIMIT_S
from umbel.aggregation.model.artifact import encode_model
from umbel.client import Client, LocalPlan, TrainResult, run_client

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(3000)]
RUNS = 50
NAMES = ("east", "north", "south", "west")
LATE_S = 2.0  # the sites of a run start within so many seconds, in any order
RUN = """
name = "{name}"
rounds = {{ count = 1, target = 4, minimum = 3, over_selection = 1.0, window_s = 10 }}
[secure_aggregation]
"""


class Ward(Client):
    """Adds a little to every weight."""

    def __init__(self) -> None:
        self.model, self.sample_count = nn.Linear(4, 2), 10

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)
        return TrainResult(self.sample_count, 1, 1)


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Two processes that compute without end."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


def test_of_fifty_secure_runs_on_a_busy_machine_none_begins_without_a_site_that_is_up(
    house: House, busy_machine: None, tmp_path: Path
) -> None:
    with house.operator() as operator:
        tokens: dict[str, str] = dict(zip(NAMES, operator.create_tokens(len(NAMES)), strict=True))

    def take_part(name: str, run: str, late_s: float) -> None:
        time.sleep(late_s)
        run_client(Ward(), house.url, tmp_path / name, run, tokens[name], name)

    cohorts = list[set[str]]()
    for number in range(RUNS):
        run, luck = f"run-{number}", random.Random(number)
        first = {name: torch.full_like(value, number / RUNS) for name, value in nn.Linear(4, 2).state_dict().items()}
        with house.operator() as operator:
            operator.create_run(run, RUN.format(name=run), operator.upload_model(encode_model(first)))
        threads = [
            threading.Thread(target=take_part, args=(name, run, luck.uniform(0, LATE_S)), daemon=True) for name in NAMES
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        with house.operator() as operator:
            records = operator.progress(run).ended
        cohorts += [{client.client for client in record.clients} for record in records]
        assert records[-1].committed, records[-1].reason
    assert cohorts
    assert [cohort for cohort in cohorts if cohort != set(NAMES)] == []
