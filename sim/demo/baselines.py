"""Baselines of the demo's accuracy: the same model, trained without a federation.

All have the same budget: start, trainer, batch size, learning rate, and as many passes over the data as a client makes
that takes part in every round (rounds x local epochs).

- *pooled*: on the union of all shards, which a real federation may not do: the upper limit;
- *alone*: each client on its own shard: the lower limit.

`python -m umbel.sim.demo.baselines SEED ROUNDS` measures them in a process of low priority, so that the federation
keeps the cores. It prints one JSON line with the pooled accuracy, and then one with all.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

from umbel.aggregation.seeds import derive_seed
from umbel.client import LocalPlan, TorchClient
from umbel.sim.data.data_set import SampleSet, score
from umbel.sim.demo.digits import DemoData, build_model, load_data
from umbel.sim.demo.plan import BATCH_SIZE, LEARNING_RATE, SPLIT, DemoPlan, make_plan
from umbel.sim.processes import when_the_starter_is_gone

_NICENESS = 15


@dataclass(frozen=True, slots=True)
class Baselines:
    """Accuracies on the held-out test set, 0 to 1. `alone`: one per client, by name; empty until measured."""

    pooled: float
    alone: tuple[float, ...]

    @property
    def alone_mean(self) -> float:
        return sum(self.alone) / len(self.alone)


def pooled_accuracy(plan: DemoPlan, data: DemoData) -> float:
    return _train(plan, data.train, data.test, "pooled")


def alone_accuracies(plan: DemoPlan, data: DemoData) -> tuple[float, ...]:
    return tuple(_train(plan, data.shards[client.shard], data.test, client.name) for client in plan.clients)


def main() -> None:
    """Measure and print."""
    when_the_starter_is_gone(lambda: os._exit(1))
    os.nice(_NICENESS)
    torch.set_num_threads(1)
    plan = make_plan(int(sys.argv[1]), int(sys.argv[2]), calm=False)
    data = load_data(SPLIT, plan.seed)
    pooled = pooled_accuracy(plan, data)
    print(json.dumps(asdict(Baselines(pooled, ()))), flush=True)
    print(json.dumps(asdict(Baselines(pooled, alone_accuracies(plan, data)))), flush=True)


def _train(plan: DemoPlan, samples: SampleSet, test: SampleSet, name: str) -> float:
    model = build_model(plan.seed)
    client = TorchClient(
        model, nn.CrossEntropyLoss(), TensorDataset(samples.inputs, samples.targets), device="cpu", metrics={}
    )
    budget = LocalPlan(
        epochs=plan.epochs,
        batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        seed=derive_seed(plan.seed, "baseline", name),
    )
    client.train(model, budget)
    return score(model, test).accuracy


if __name__ == "__main__":
    main()
