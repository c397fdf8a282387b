"""Each federated algorithm against a plain float64 implementation of its paper's pseudo-code, over twenty rounds.

All samples of a client are the same, so the order of its batches tells nothing. Clients differ in how many they have,
and so in their steps.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from umbel.aggregation.types import client_number
from umbel.client import TorchClient
from umbel.client.local.batches import split_sizes
from umbel.sim import simulate
from umbel.sim.experiment.trials import TrialResult

Vector = npt.NDArray[np.float64]
SIZES = (2, 5, 9, 18)
INPUTS = np.array([[1.0, 0.5, -1.0], [0.2, -0.7, 0.4], [-1.0, 1.0, 0.3], [0.6, 0.1, 0.8]], dtype=np.float32)
TARGETS = (0, 1, 2, 1)
N_ROUNDS, RATE, BATCH, EPOCHS = 20, 0.05, 3, 2
STEPS = tuple(EPOCHS * -(-size // BATCH) for size in SIZES)


def first_weights() -> Vector:
    return np.random.default_rng(5).normal(0, 0.5, (3, 3)).astype(np.float32).astype(np.float64)


def clients() -> list[TorchClient]:
    found = list[TorchClient]()
    for size, inputs, target in zip(SIZES, INPUTS, TARGETS, strict=True):
        model = nn.Linear(3, 3, bias=False)
        model.weight.data = torch.tensor(first_weights(), dtype=torch.float32)
        samples = TensorDataset(torch.tensor(inputs).repeat(size, 1), torch.full((size,), target))
        found.append(TorchClient(model, "classes", samples))
    return found


def simulated(training: dict[str, Any], **more: Any) -> Vector:
    """The weights after twenty rounds with all clients."""
    described: dict[str, Any] = {
        "rounds": {"count": N_ROUNDS, "target": 4, "minimum": 4, "over_selection": 1.0},
        "training": {"local_epochs": EPOCHS, "batch_size": BATCH, "learning_rate": RATE, **training},
        "engine": {"name": "sequential"},
        **more,
    }
    found = simulate(described, clients=clients()).trials[0].model
    return found.state()["weight"].double().numpy()


def gradient(w: Vector, client: int) -> Vector:
    """Of the cross-entropy of W x, for the one sample that this client has."""
    x = INPUTS[client].astype(np.float64)
    scores = np.exp(w @ x - (w @ x).max())
    shares = scores / scores.sum()
    shares[TARGETS[client]] -= 1.0
    return np.outer(shares, x)


def local_sgd(w: Vector, client: int, n_steps: int, more: Callable[[Vector], Vector] = np.zeros_like) -> Vector:
    """The change that `n_steps` make. `more`: what the algorithm adds to the gradient at the weights it is given."""
    y = w.copy()
    for _ in range(n_steps):
        y = y - RATE * (gradient(y, client) + more(y))
    return y - w


def mean(values: Sequence[Vector]) -> Vector:
    """Weighted by samples."""
    return np.average(np.stack(values), axis=0, weights=SIZES)


def fedavg(w: Vector) -> Vector:
    return w + mean([local_sgd(w, i, n) for i, n in enumerate(STEPS)])


def fedprox(w: Vector) -> Vector:
    """Li et al. 2020, algorithm 2, with mu = 0.3."""
    return w + mean([local_sgd(w, i, n, lambda y: 0.3 * (y - w)) for i, n in enumerate(STEPS)])


def fednova(w: Vector) -> Vector:
    """Wang et al. 2020, eq. 6 and 7."""
    effective = np.average(STEPS, weights=SIZES)
    return w + effective * mean([local_sgd(w, i, n) / n for i, n in enumerate(STEPS)])


Q = 2.0


def loss(w: Vector, client: int) -> float:
    """The cross-entropy of W x, for the one sample that this client has."""
    scores = w @ INPUTS[client].astype(np.float64)
    return float(np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[TARGETS[client]])


def qfedavg(w: Vector) -> Vector:
    """Li et al. 2020 (q-FedAvg), algorithm 2, with L = 1 / learning rate. All clients take part, and in the place of
    the draws are weights of the clients.
    """
    steps, bounds = list[Vector](), list[float]()
    for i, n in enumerate(STEPS):
        found, gradients = loss(w, i), -local_sgd(w, i, n) / RATE
        steps.append(found**Q * gradients)
        bounds.append(Q * found ** (Q - 1) * float((gradients**2).sum()) + found**Q / RATE)
    return w - mean(steps) / float(np.average(bounds, weights=SIZES))


ALPHA = 2.0


EVERYBODY = tuple(range(len(SIZES)))
TOTAL = sum(SIZES)


class FedDyn:
    """Acar et al. 2021, algorithm 1, with alpha = 2; the sums are weighted by samples."""

    def __init__(self) -> None:
        self._q = [np.zeros((3, 3)) for _ in SIZES]
        self._h = np.zeros((3, 3))

    def __call__(self, w: Vector, cohort: Sequence[int] = EVERYBODY) -> Vector:
        moved = np.zeros((3, 3))
        for i in cohort:
            change = local_sgd(w, i, STEPS[i], lambda y, q=self._q[i]: ALPHA * (y - w) - q)  # type: ignore[misc]
            self._q[i] = self._q[i] - ALPHA * change
            self._h = self._h - ALPHA * SIZES[i] / TOTAL * change
            moved = moved + SIZES[i] * change
        return w + moved / sum(SIZES[i] for i in cohort) - self._h / ALPHA


class Scaffold:
    """Karimireddy et al. 2020, algorithm 1; the sums are weighted by samples."""

    def __init__(self, option: int) -> None:
        self._option, self._of_all = option, np.zeros((3, 3))
        self._own = [np.zeros((3, 3)) for _ in SIZES]

    def __call__(self, w: Vector, cohort: Sequence[int] = EVERYBODY) -> Vector:
        moved, before = np.zeros((3, 3)), self._of_all
        for i in cohort:
            offset = before - self._own[i]
            change = local_sgd(w, i, STEPS[i], lambda y, o=offset: o)  # type: ignore[misc]
            after = gradient(w, i) if self._option == 1 else -offset - change / (STEPS[i] * RATE)
            self._of_all = self._of_all + SIZES[i] / TOTAL * (after - self._own[i])
            self._own[i] = after
            moved = moved + SIZES[i] * change
        return w + moved / sum(SIZES[i] for i in cohort)


ALGORITHMS: dict[str, tuple[dict[str, Any], Callable[[], Callable[[Vector], Vector]]]] = {
    "fedavg": ({}, lambda: fedavg),
    "fedprox": ({"algorithm": "fedprox", "proximal_mu": 0.3}, lambda: fedprox),
    "fednova": ({"algorithm": "fednova"}, lambda: fednova),
    "qfedavg": ({"algorithm": "qfedavg", "q": Q, "loss_max": 4.0}, lambda: qfedavg),
    "feddyn": ({"algorithm": "feddyn", "proximal_mu": ALPHA, "total_samples": TOTAL}, FedDyn),
    "scaffold, option I": (
        {"algorithm": "scaffold", "total_samples": TOTAL, "control_variate": "gradient"},
        lambda: Scaffold(1),
    ),
    "scaffold, option II": ({"algorithm": "scaffold", "total_samples": TOTAL}, lambda: Scaffold(2)),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_twenty_rounds_are_those_of_the_paper(name: str) -> None:
    training, of_the_paper = ALGORITHMS[name]
    expected, round_of_the_paper = first_weights(), of_the_paper()
    for _ in range(N_ROUNDS):
        expected = round_of_the_paper(expected)
    assert np.abs(simulated(training) - expected).max() < 1e-6


OF_ALL_CLIENTS = ("feddyn", "scaffold, option I", "scaffold, option II")


@pytest.mark.parametrize("name", OF_ALL_CLIENTS)
def test_with_two_clients_in_a_round_twenty_rounds_are_those_of_the_paper_weighted_by_samples(name: str) -> None:
    """A client's change counts in the mean over all clients by its share of all samples, not of the round's."""
    training, of_the_paper = ALGORITHMS[name]
    found = cohorts_of(training, 2)
    expected, round_of_the_paper = first_weights(), of_the_paper()
    for row in found.rows:
        expected = round_of_the_paper(expected, [client_number(one["client"]) for one in row.clients])  # type: ignore[call-arg]
    assert np.abs(found.model.state()["weight"].double().numpy() - expected).max() < 1e-6


class AdaptiveFedProx:
    """Li et al. 2020, algorithm 2, with the mu of section 5.3, which begins with 1, over given cohorts of clients."""

    def __init__(self) -> None:
        self.mu, self.mus, self.losses = 1.0, list[float](), list[float]()
        self._n_falls = 0

    def round(self, w: Vector, cohort: Sequence[int]) -> Vector:
        self.mus.append(self.mu)
        changes, losses = list[Vector](), list[float]()
        for client in cohort:
            seen = list[Vector]()  # the weights before each step

            def pull(y: Vector, seen: list[Vector] = seen) -> Vector:
                seen.append(y)
                return self.mu * (y - w)

            changes.append(local_sgd(w, client, STEPS[client], pull))
            sizes = split_sizes(SIZES[client], BATCH) * EPOCHS
            losses.append(float(np.average([loss(y, client) for y in seen], weights=sizes)))
        weights = [SIZES[client] for client in cohort]
        self._adapt(float(np.average(losses, weights=weights)))
        return w + np.average(np.stack(changes), axis=0, weights=weights)

    def _adapt(self, loss: float) -> None:
        before = self.losses[-1] if self.losses else loss
        self.losses.append(loss)
        self._n_falls = self._n_falls + 1 if loss < before else 0
        if loss > before:
            self.mu += 0.1
        elif self._n_falls == 5:
            self.mu, self._n_falls = max(self.mu - 0.1, 0.0), 0


def cohorts_of(training: dict[str, Any], target: int) -> TrialResult:
    """The run with `target` of the clients in each round."""
    described: dict[str, Any] = {
        "rounds": {"count": N_ROUNDS, "target": target, "minimum": target, "over_selection": 1.0},
        "training": {"local_epochs": EPOCHS, "batch_size": BATCH, "learning_rate": RATE, **training},
        "engine": {"name": "sequential"},
        "measure": {"clients": True},
    }
    return simulate(described, clients=clients()).trials[0]


@pytest.mark.parametrize(("target", "rises", "falls"), [(2, True, False), (4, False, True)])
def test_twenty_rounds_with_an_adaptive_mu_are_those_of_the_paper(target: int, *, rises: bool, falls: bool) -> None:
    """With two clients in a round the mean loss depends on which two; with all of them it falls in each round."""
    found = cohorts_of({"algorithm": "fedprox", "proximal_mu": 1.0, "adaptive_mu": True}, target)
    expected, paper = first_weights(), AdaptiveFedProx()
    for row in found.rows:
        cohort = [client_number(one["client"]) for one in row.clients]
        assert len(cohort) == target
        expected = paper.round(expected, cohort)
    assert [row.proximal_mu for row in found.rows] == pytest.approx(paper.mus, abs=1e-9)
    assert [row.train_loss for row in found.rows] == pytest.approx(paper.losses, abs=1e-6)
    assert np.abs(found.model.state()["weight"].double().numpy() - expected).max() < 1e-6
    steps = [after - before for before, after in pairwise(paper.mus)]
    assert (max(steps) > 0, min(steps) < 0) == (rises, falls)


def test_algorithms_differ_by_much_more_than_that() -> None:
    ends = [simulated(training) for training, _ in ALGORITHMS.values()]
    assert min(np.abs(a - b).max() for i, a in enumerate(ends) for b in ends[:i]) > 1e-2


def test_under_masks_scaffold_makes_the_same_steps_within_rounding() -> None:
    """What the codec rounds away is not lost: otherwise the error would be 0.02 after twenty rounds, and grow."""
    terms = {"algorithm": "scaffold", "total_samples": TOTAL, "local_epochs": None, "local_steps": 6}
    masked = simulated(
        terms,
        codec={"name": "integer", "step": 1 / 256, "first_norm": 1.0},
        secure_aggregation={"expected_sample_count": 10},
    )
    assert np.abs(masked - simulated(terms)).max() < 0.005
    assert np.abs(masked - simulated({"local_epochs": None, "local_steps": 6})).max() > 0.015


def test_under_masks_fednova_makes_the_same_steps_within_rounding() -> None:
    plain = simulated({"algorithm": "fednova"})
    masked = simulated(
        {"algorithm": "fednova"},
        codec={"name": "integer", "step": 1 / 256, "first_norm": 1.0},
        secure_aggregation={"expected_sample_count": 10},
    )
    assert np.abs(masked - plain).max() < 0.02
    assert np.abs(simulated({}) - plain).max() > 0.1
