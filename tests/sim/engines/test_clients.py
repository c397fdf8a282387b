"""Real clients in the place of an engine: they are found by their numbers, stopped after their steps, or told about."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.sim.engines.cohorts import STRUCTURED, all_changes, recipe, start_of, work_of
from umbel.aggregation.plans.codec import CodecPlan
from umbel.client.app import Client
from umbel.client.local.plan import LocalPlan
from umbel.client.local.results import TrainResult
from umbel.client.training.trainer import TorchClient
from umbel.sim.engines.clients import ClientsEngine
from umbel.sim.engines.model import ModelRecipe
from umbel.sim.engines.training import SequentialEngine
from umbel.sim.engines.work import CohortWork, EngineError

SIZES, STEPS = [9, 4, 13], [7, 2, 12]


def work(codec: CodecPlan | None = None) -> CohortWork:
    """Of the clients 4, 0 and 2, each of which holds what the engines' tests give to that place of a cohort."""
    made = work_of(SIZES, STEPS, proximal_mu=0.1, codec=codec)
    asked = replace(made.plan, local_epochs=None, local_steps=max(STEPS))
    return replace(made, plan=asked, clients=np.array([4, 0, 2]))


def clients(made_by: ModelRecipe, of: CohortWork) -> list[Client]:
    """Five, of whom those that have no work here must not be asked."""
    found = list[Client](Untouchable() for _ in range(5))
    for position, number in enumerate(of.clients.tolist()):
        own = of.data.of(position)
        data = TensorDataset(own.inputs, own.targets)
        found[number] = TorchClient(made_by.make(), nn.CrossEntropyLoss(), data, device="cpu")
    return found


class Untouchable(Client):
    def __init__(self) -> None:
        self.model, self.sample_count = nn.Linear(1, 1), 1

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        raise AssertionError("this client was not asked")


class Own(Client):
    """A site's own code."""

    def __init__(self, train: Callable[[nn.Module, LocalPlan], TrainResult]) -> None:
        self.model, self.sample_count = recipe("linear").make(), 9
        self._train = train

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        return self._train(model, plan)


@pytest.mark.parametrize("name", ["mlp", "with_dropout", "tied"])
def test_real_clients_make_of_their_work_what_the_simulators_own_engine_makes(name: str) -> None:
    start = start_of(recipe(name))
    values, losses = all_changes(ClientsEngine(clients(recipe(name), work())), start, work())
    expected, expected_losses = all_changes(SequentialEngine(recipe(name), arithmetic="sdk"), start, work())
    assert torch.equal(values, expected)
    assert np.array_equal(losses, expected_losses)


@pytest.mark.parametrize("codec", STRUCTURED)
def test_they_train_what_the_codec_can_carry(codec: str) -> None:
    carried, start = work(STRUCTURED[codec]), start_of(recipe("mlp"))
    values, _ = all_changes(ClientsEngine(clients(recipe("mlp"), carried)), start, carried)
    expected, _ = all_changes(SequentialEngine(recipe("mlp"), arithmetic="sdk"), start, carried)
    assert torch.equal(values, expected)


def test_work_that_does_not_say_whose_it_is_cannot_be_done() -> None:
    with pytest.raises(EngineError, match="needs the clients' numbers"):
        next(ClientsEngine([]).train(start_of(recipe("linear")), work_of(SIZES, STEPS)))


def one(train: Callable[[nn.Module, LocalPlan], TrainResult]) -> CohortWork:
    """The work of one client with such code, done."""
    asked = replace(work_of([9], [3]), clients=np.array([0]))
    next(ClientsEngine([Own(train)]).train(start_of(recipe("linear")), asked))
    return asked


def test_a_client_that_does_not_stop_when_it_is_told_to_is_named_with_what_to_do() -> None:
    with pytest.raises(
        EngineError, match=r"client 0 did 5 steps, but its simulated device has time for 3: .*should_stop"
    ):
        one(lambda model, plan: TrainResult(9, 5, 5))


def test_a_client_that_asks_after_each_step_is_stopped_in_time() -> None:
    def train(model: nn.Module, plan: LocalPlan) -> TrainResult:
        n_done = 1
        while plan.should_stop() is None:
            n_done += 1
        return TrainResult(9, n_done, 100)

    one(train)


def test_a_client_whose_own_code_fails_is_named_with_the_error() -> None:
    def train(model: nn.Module, plan: LocalPlan) -> TrainResult:
        raise OSError("no such ward")

    with pytest.raises(EngineError, match=r"client 0 failed: OSError.*no such ward"):
        one(train)
