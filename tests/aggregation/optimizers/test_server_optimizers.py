"""Each server optimizer against its paper's pseudo-code in numpy's float64, over twenty rounds."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from umbel.aggregation.optimizers.adaptive import adagrad, adam, yogi
from umbel.aggregation.optimizers.layerwise import lamb, lars, trust_of
from umbel.aggregation.optimizers.momentum import momentum
from umbel.aggregation.optimizers.server_optimizer import LayerwiseRule, Moment, ServerOptimizer
from umbel.aggregation.optimizers.sgd import sgd

Vector = npt.NDArray[np.float64]
Oracle = Callable[[Vector, Callable[[Vector, int], Vector]], Vector]
Remembered = dict[str, Vector]  # by a paper's own names
N, ROUNDS, RATE = 50, 20, 0.05


def rounds(optimizer: ServerOptimizer, x: Vector, change: Callable[[Vector, int], Vector]) -> Vector:
    values = torch.tensor(x)
    slots = {name: torch.full((len(x),), first, dtype=torch.float32) for name, first in optimizer.first.items()}
    for n in range(1, ROUNDS + 1):
        given = torch.tensor(change(values.numpy(), n))
        wide, at, rule = {name: one.double() for name, one in slots.items()}, Moment(n, RATE), optimizer.step
        if isinstance(rule, LayerwiseRule):
            norms = [float(one.norm()) for one in (values, rule.direction(given.clone(), wide, at))]
            values = values + rule.step(given, wide, at, trust_of(norms[0], norms[1], rule.ratio))
        else:
            values = values + rule(given, wide, at)
        slots = {name: one.float() for name, one in wide.items()}
    return values.numpy()


def towards_one(x: Vector, n: int) -> Vector:
    """What clients would send: each value has its own speed, and every third round is noisy."""
    speed = np.geomspace(1e-3, 1.0, len(x))
    noise = np.random.default_rng(n).normal(0, 0.02, len(x)) if n % 3 == 0 else 0.0
    return speed * (1.0 - x) + noise


def paper(update: Callable[[Vector, Remembered, int], Vector]) -> Oracle:
    def run(x: Vector, change: Callable[[Vector, int], Vector]) -> Vector:
        memory: Remembered = {}
        for n in range(1, ROUNDS + 1):
            memory["x"] = x
            x = x + update(change(x, n), memory, n)
        return x

    return run


def fedavgm(d: Vector, memory: Remembered, _n: int) -> Vector:
    memory["v"] = 0.9 * memory.get("v", np.zeros_like(d)) + d
    return RATE * memory["v"]


def nesterov(d: Vector, memory: Remembered, _n: int) -> Vector:
    memory["v"] = 0.9 * memory.get("v", np.zeros_like(d)) + d
    return RATE * (d + 0.9 * memory["v"])


def fedopt(second: Callable[[Vector, Vector], Vector], v0: float) -> Callable[[Vector, Remembered, int], Vector]:
    def update(d: Vector, memory: Remembered, _n: int) -> Vector:
        memory["m"] = 0.9 * memory.get("m", np.zeros_like(d)) + 0.1 * d
        memory["v"] = second(memory.get("v", np.full_like(d, v0)), d)
        return RATE * memory["m"] / (np.sqrt(memory["v"]) + 1e-3)

    return update


def adam_corrected(d: Vector, memory: Remembered, n: int) -> Vector:
    memory["m"] = 0.9 * memory.get("m", np.zeros_like(d)) + 0.1 * d
    memory["v"] = 0.99 * memory.get("v", np.zeros_like(d)) + 0.01 * d**2
    return RATE * math.sqrt(1 - 0.99**n) / (1 - 0.9**n) * memory["m"] / (np.sqrt(memory["v"]) + 1e-3)


def lars_of_the_paper(d: Vector, memory: Remembered, _n: int) -> Vector:
    local = 0.1 * np.linalg.norm(memory["x"]) / np.linalg.norm(d)
    memory["v"] = 0.9 * memory.get("v", np.zeros_like(d)) + RATE * local * d
    return memory["v"]


def lamb_of_the_paper(d: Vector, memory: Remembered, n: int) -> Vector:
    memory["m"] = 0.9 * memory.get("m", np.zeros_like(d)) + 0.1 * d
    memory["v"] = 0.99 * memory.get("v", np.zeros_like(d)) + 0.01 * d**2
    r = memory["m"] / (1 - 0.9**n) / (np.sqrt(memory["v"] / (1 - 0.99**n)) + 1e-6)
    return RATE * float(np.linalg.norm(memory["x"]) / np.linalg.norm(r)) * r


CASES = {
    "sgd": (sgd(), paper(lambda d, _memory, _n: RATE * d)),
    "momentum": (momentum(0.9), paper(fedavgm)),
    "nesterov": (momentum(0.9, nesterov=True), paper(nesterov)),
    "adagrad": (adagrad(0.9, 1e-3, 1e-6), paper(fedopt(lambda v, d: v + d**2, 1e-6))),
    "yogi": (
        yogi(0.9, 0.99, 1e-3, 1e-6),
        paper(fedopt(lambda v, d: v - 0.01 * d**2 * np.sign(v - d**2), 1e-6)),
    ),
    "adam": (adam(0.9, 0.99, 1e-3, 1e-6), paper(fedopt(lambda v, d: 0.99 * v + 0.01 * d**2, 1e-6))),
    "adam, corrected": (adam(0.9, 0.99, 1e-3, 0.0, corrected_from=1), paper(adam_corrected)),
    "lars": (lars(0.9, 0.1), paper(lars_of_the_paper)),
    "lamb": (lamb(0.9, 0.99, 1e-6), paper(lamb_of_the_paper)),
}


@pytest.mark.parametrize("name", CASES)
def test_twenty_rounds_are_those_of_the_paper(name: str) -> None:
    optimizer, oracle = CASES[name]
    start = np.random.default_rng(1).normal(0, 0.5, N)
    assert np.abs(rounds(optimizer, start, towards_one) - oracle(start, towards_one)).max() < 1e-6
