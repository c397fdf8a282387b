"""What clients keep under SCAFFOLD, beside what the coordinator has: c is the mean of all c_i by samples, with every
codec.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.sim.federation.worlds import table
from umbel.aggregation.model.layout import CONTROL_PREFIX
from umbel.aggregation.run.standing import beginning
from umbel.aggregation.types import client_number
from umbel.sim.data.population import ShardedPopulation
from umbel.sim.experiment.file import experiment_of
from umbel.sim.experiment.world import make_world
from umbel.sim.federation.federation import Federation

SIZES = (40, 150, 60, 20, 110, 90, 150, 70)  # samples of each client
N_CLIENTS = len(SIZES)
CODECS: dict[str, dict[str, Any]] = {
    "float32": {"name": "float32"},
    "integer": {"name": "integer", "step": 2.0},
    "topk": {"name": "topk", "share": 0.1, "error_feedback": True},
    "eden": {"name": "eden", "bits": 1},
    "changes": {"name": "integer"},
    "masked": {"name": "integer", "step": 2.0},
}


def scaffold(name: str, variate: str = "change") -> dict[str, Any]:
    """Four of eight clients take part in each round."""
    terms = {"algorithm": "scaffold", "total_samples": sum(SIZES), "control_variate": variate}
    described = table(
        rounds={"count": 6, "target": 4, "minimum": 4, "over_selection": 1.0},
        training={**terms, "local_epochs": None, "local_steps": 5},
        codec=CODECS[name],
        **({"downlink": {"name": "change"}} if name == "changes" else {}),
        **({"secure_aggregation": {"expected_sample_count": 200}} if name == "masked" else {}),
    )
    return {**described, "partition": {"scheme": "shards", "clients": N_CLIENTS, "shards_each": 2}}


def played(described: dict[str, Any]) -> Federation:
    trial = experiment_of(described).trials[0]
    made = make_world(trial, Path(), None)
    data = made.world.population.data_of(np.arange(N_CLIENTS))
    dealt = [data.rows[first : first + size] for first, size in zip(data.starts[:-1], SIZES, strict=True)]
    population = ShardedPopulation(data.samples, dealt, made.world.population.test)
    federation = Federation(replace(made.world, population=population), beginning(trial.run, made.model), made.model)
    assert all(one.record.committed for one in federation.attempts())
    return federation


def of_all(federation: Federation) -> Tensor:
    """c of the full-precision model, where a weight has one."""
    model = federation.model
    found = torch.zeros(model.layout.model.n_values)
    for spec in model.layout.model.owners():
        if spec.is_stepped:
            found[spec.place] = model.master[CONTROL_PREFIX + spec.name].reshape(-1)
    return found


@pytest.mark.parametrize(
    ("name", "variate"),
    [
        (name, variate)
        for name in CODECS
        for variate in ("change", "gradient")
        if (name, variate) != ("masked", "gradient")
    ],
)
def test_the_global_control_variate_is_the_mean_of_the_clients(name: str, variate: str) -> None:
    federation = played(scaffold(name, variate))
    kept = federation.memory.kept
    assert 4 < len(kept) <= N_CLIENTS, "others are asked in other rounds"
    mean = torch.stack([one * SIZES[client_number(name)] for name, one in kept.items()]).sum(0) / sum(SIZES)
    assert float(mean.norm()) > 0.1
    torch.testing.assert_close(of_all(federation), mean, rtol=0, atol=1e-5)
