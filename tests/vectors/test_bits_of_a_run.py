"""The models of a simulated run: the same on every machine, if its clients compute exactly, plain and masked.

Clients that train have matrix products of their own libraries; these draw their changes from Philox instead. All the
rest is what a run goes through: cohorts, weights, codecs, steps that follow from the round before, sums and models.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.vectors.test_bits import exact
from umbel.aggregation.run.standing import beginning
from umbel.sim.engines.work import Changes, CohortWork
from umbel.sim.experiment.file import experiment_of
from umbel.sim.experiment.world import make_world
from umbel.sim.federation.federation import Federation

pytestmark = pytest.mark.bits
FROZEN: dict[str, list[str]] = json.loads((Path(__file__).parent / "bits.json").read_text())["runs"]
START = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))
for parameter in START.parameters():
    nn.init.zeros_(parameter)
RUN: dict[str, Any] = {
    "name": "exact",
    "data": {"name": "digits"},
    "partition": {"scheme": "shards", "clients": 12, "shards_each": 2},
    "model": {"name": f"{__name__}:START"},
    "engine": {"name": "sequential", "score_every": 100},
    "fleet": {},
    "rounds": {"count": 3, "target": 5},
    "aggregation": {"server_learning_rate": 0.7},
}
RUNS: dict[str, dict[str, Any]] = {
    "float32": {},
    "integer": {"codec": {"name": "integer", "clip_norm": 3.0}},
    "eden": {"codec": {"name": "eden", "clip_norm": 3.0}},
    "changes down": {"codec": {"name": "integer"}, "downlink": {"name": "change"}},
    "masked": {
        "codec": {"name": "integer", "clip_norm": 3.0},
        "secure_aggregation": {"enabled": True},
        "rounds": {"count": 3, "target": 5, "minimum": 5},
    },
}


@dataclass(frozen=True, slots=True)
class Exact:
    """An engine of clients whose changes are a function of their seeds alone."""

    name: str = "exact"

    def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        for position, seed in enumerate(work.seeds.tolist()):
            nothing = np.zeros(1)
            values = exact(start.numel(), seed).unsqueeze(0)
            yield Changes(np.array([position]), values, nothing, nothing, nothing)

    def close(self) -> None:
        """Holds nothing."""


def models_of(changes: dict[str, Any]) -> list[str]:
    """The hash of each version that the run makes."""
    trial = experiment_of({**RUN, **changes}).trials[0]
    made = make_world(trial, Path(), None)
    made.world.close()
    federation = Federation(replace(made.world, engine=Exact()), beginning(trial.run, made.model), made.model)
    return [one.model.file.sha256 for one in federation.attempts() if one.record.committed]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", RUNS)
def test_the_models_are_those_of_every_machine(name: str) -> None:
    assert models_of(RUNS[name]) == FROZEN[name]
