"""Ten SDK clients that do no work, each a thread with the real client loop; started by `bench.py`.

`python -m umbel.sim.bench.coordinator.clients`: the first line of standard input is the JSON list of sites.
"""

import os
import sys
import threading
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import nn

from umbel.client import Client, LocalPlan, TrainResult, run_client
from umbel.sim.demo.client import DemoSite
from umbel.sim.processes import when_the_starter_is_gone

N_VALUES = 10


class IdleModel(nn.Module):
    """Ten weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(N_VALUES))


class IdleClient(Client):
    """Its training is one addition."""

    def __init__(self) -> None:
        self.model = IdleModel()
        self.sample_count = 1

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        with torch.no_grad():
            for weights in model.parameters():
                weights.add_(0.001)
        return TrainResult(sample_count=1, steps_done=1, steps_planned=1)


def main() -> None:
    """Take part until the run is over."""
    torch.set_num_threads(1)
    sites = TypeAdapter(list[DemoSite]).validate_json(sys.stdin.readline())
    when_the_starter_is_gone(lambda: os._exit(1))
    threads = [threading.Thread(target=_take_part, args=(site,), name=site.name) for site in sites]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _take_part(site: DemoSite) -> None:
    run_client(IdleClient(), site.server_url, Path(site.directory), site.run, token=site.token, name=site.name)


if __name__ == "__main__":
    main()
