"""Small experiments, as tables, and what comes of them."""

from pathlib import Path
from typing import Any

from torch import nn

from umbel.aggregation.run.standing import beginning
from umbel.sim.experiment.file import experiment_of
from umbel.sim.experiment.world import make_world
from umbel.sim.federation.federation import Federation, SimulatedAttempt

SMALL: dict[str, Any] = {
    "name": "small",
    "data": {"name": "digits"},
    "partition": {"scheme": "dirichlet", "clients": 30, "alpha": 0.5},
    "model": {"name": "mlp", "hidden": [8]},
    "engine": {"name": "batched"},
    "fleet": {},
    "rounds": {"count": 4, "target": 6},
    "training": {"local_epochs": 1, "batch_size": 10, "learning_rate": 0.1},
}


def table(**changes: Any) -> dict[str, Any]:
    """The small experiment with other sections; None takes one out."""
    merged = {
        key: {**SMALL.get(key, {}), **value} if isinstance(value, dict) else value for key, value in changes.items()
    }
    return {key: value for key, value in {**SMALL, **merged}.items() if value is not None}


def attempts_of(described: dict[str, Any]) -> list[SimulatedAttempt]:
    """All attempts of the experiment's first run."""
    trial = experiment_of(described).trials[0]
    made = make_world(trial, Path(), None)
    try:
        return list(Federation(made.world, beginning(trial.run, made.model), made.model).attempts())
    finally:
        made.world.close()


def hashes(described: dict[str, Any]) -> list[str]:
    """Of each version that the first run makes."""
    return [one.model.file.sha256 for one in attempts_of(described) if one.record.committed]


def with_statistics() -> nn.Module:
    """A model for the digits, with values that no codec rounds: running statistics, and a counter."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
