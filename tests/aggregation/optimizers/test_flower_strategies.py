"""The server optimizers against Flower's strategies, over twenty rounds of the same changes.

The keys of each are those that `docs/how-to/move-from-flower.md` names.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is in the environment of the Flower tests only (make test)")

import flwr.server.strategy as older
import flwr.serverapp.strategy as newer
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays

from tests.aggregation.optimizers.test_server_optimizers import RATE, ROUNDS, N, Vector, rounds, towards_one
from tests.client.flower.codec.messages import AppGrid, Arrays, app_of, arrays_in, record_of
from umbel.aggregation.optimizers.build import optimizer_of
from umbel.aggregation.optimizers.section import AggregationSection
from umbel.aggregation.plans.training import TrainingPlan

Change = Callable[[Vector, int], Vector]
TAU = 1e-3
FEDOPT: dict[str, Any] = {"eta": RATE, "tau": TAU}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "FedAdam": (
        {**FEDOPT, "beta_1": 0.9, "beta_2": 0.99},
        {
            "optimizer": "adam",
            "beta1": 0.9,
            "beta2": 0.99,
            "tau": TAU,
            "bias_correction": True,
            "bias_correction_from": 2,
        },
    ),
    "FedYogi": (
        {**FEDOPT, "beta_1": 0.9, "beta_2": 0.99},
        {"optimizer": "yogi", "beta1": 0.9, "beta2": 0.99, "tau": TAU, "v0": 0.0},
    ),
    "FedAdagrad": (FEDOPT, {"optimizer": "adagrad", "tau": TAU, "v0": 0.0}),
    "FedAvgM": (
        {"server_learning_rate": RATE, "server_momentum": 0.9},
        {"optimizer": "momentum", "momentum": 0.9},
    ),
}


def by_messages(name: str, arguments: dict[str, Any], x: Vector, change: Change) -> Vector:
    """The last model of a strategy of `flwr.serverapp.strategy` with one node."""
    strategy = getattr(newer, name)(**arguments, min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0)
    numbers = count(1)

    def train(arrays: Arrays, _node: int) -> Arrays:
        return {"w": arrays["w"] + change(arrays["w"], next(numbers))}

    result = strategy.start(grid=AppGrid([app_of(train)]), initial_arrays=record_of({"w": x}), num_rounds=ROUNDS)
    return arrays_in(result.arrays)["w"]


def by_parameters(name: str, arguments: dict[str, Any], x: Vector, change: Change) -> Vector:
    """The last model of a strategy of `flwr.server.strategy` with one client."""
    strategy = getattr(older, name)(**arguments, initial_parameters=ndarrays_to_parameters([x]))
    for n in range(1, ROUNDS + 1):
        sent = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([x + change(x, n)]), 10, {})
        found, _ = strategy.aggregate_fit(n, [(None, sent)], [])
        (x,) = parameters_to_ndarrays(found)
    return x


@pytest.mark.parametrize("flower", [by_messages, by_parameters], ids=["serverapp", "server"])
@pytest.mark.parametrize("name", CASES)
def test_twenty_rounds_are_those_of_flowers_strategy(name: str, flower: Callable[..., Vector]) -> None:
    arguments, keys = CASES[name]
    start = np.random.default_rng(1).normal(0, 0.5, N)
    theirs = flower(name, arguments, start, towards_one)
    ours = rounds(optimizer_of(AggregationSection(**keys), TrainingPlan()), start, towards_one)
    assert np.abs(ours - theirs).max() < 1e-6
    assert np.abs(theirs - start).max() > 0.1, "the model moves"
