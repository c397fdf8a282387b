"""Clients for the tests of engines and experiments that run real `Client` objects, as `make_...` functions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from umbel.aggregation.plans.assignment import Assignment, ModelRef, assignment_id
from umbel.aggregation.plans.codec import CodecPlan, Grid
from umbel.aggregation.plans.tensors import TensorKind
from umbel.aggregation.plans.training import TrainingPlan
from umbel.aggregation.run.model_state import ModelState
from umbel.aggregation.types import ClientId, RunId
from umbel.client import Client, Evaluation, LocalPlan, TorchClient, TrainResult
from umbel.client.training.counts import class_confusion_counts
from umbel.sim.engines.clients.app import ClientApp, ClientShare
from umbel.sim.engines.clients.states import ClientStates
from umbel.sim.engines.clients.work import ClientGroup, ClientsWork, GlobalModel

HERE = "tests.sim.engines.clients.sites"
N_FEATURES, N_CLASSES = 5, 3


def net(hidden: int = 4) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(N_FEATURES, hidden), nn.ReLU(), nn.Dropout(0.3), nn.Linear(hidden, N_CLASSES)
    )


def samples_of(number: int) -> torch.utils.data.TensorDataset:
    draw = torch.Generator().manual_seed(number)
    n = 6 + number % 5
    return torch.utils.data.TensorDataset(
        torch.randn(n, N_FEATURES, generator=draw), torch.randint(N_CLASSES, (n,), generator=draw)
    )


def make_client(number: int, of: int) -> TorchClient:
    """Brings its own data."""
    return TorchClient(net(), nn.CrossEntropyLoss(), samples_of(number), samples_of(number + of), device="cpu")


def make_smooth(number: int, of: int) -> TorchClient:
    """Trains a convex model."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(N_FEATURES, N_CLASSES))
    return TorchClient(model, nn.CrossEntropyLoss(), samples_of(number), samples_of(number + of), device="cpu")


def make_wide(number: int, of: int, hidden: int = 4) -> TorchClient:
    return TorchClient(net(hidden), nn.CrossEntropyLoss(), samples_of(number), samples_of(number + of), device="cpu")


def make_counting(number: int, of: int) -> TorchClient:
    """Counts what it trained on and what it holds out, beside the means."""

    def confusion(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return class_confusion_counts(logits, target, N_CLASSES)

    return TorchClient(
        net(),
        nn.CrossEntropyLoss(),
        samples_of(number),
        samples_of(number + of),
        device="cpu",
        counts={"confusion": confusion},
    )


def make_client_of_share(number: int, of: int, data: ClientShare) -> TorchClient:
    """Digits, as the file deals them."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 10))
    return TorchClient(model, nn.CrossEntropyLoss(), data.train, data.holdout, device="cpu")


class Scripted(Client):
    """Trains and measures with what it was made of."""

    def __init__(
        self,
        train: Callable[[nn.Module, LocalPlan], TrainResult],
        evaluate: Callable[[nn.Module], Evaluation | None] = lambda model: None,
        sample_count: int = 9,
    ) -> None:
        self.model, self.sample_count = net(), sample_count
        self._train, self._evaluate = train, evaluate

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        return self._train(model, plan)

    def evaluate(self, model: nn.Module) -> Evaluation | None:
        return self._evaluate(model)


def careless_training(model: nn.Module, plan: LocalPlan) -> TrainResult:
    """Draws from the process's generators, which it never seeds."""
    planned, done, loss = plan.steps_for(4), 0, torch.zeros(())
    optimizer = torch.optim.SGD(model.parameters(), lr=plan.learning_rate)
    while done < planned and (done == 0 or plan.should_stop() is None):
        inputs = torch.randn(7, N_FEATURES) + float(np.random.normal())
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), torch.randint(N_CLASSES, (7,)))
        loss.backward()
        optimizer.step()
        done += 1
    return TrainResult(9, done, planned, {"loss": loss.item()})


def make_careless(number: int, of: int) -> Client:
    return Scripted(careless_training, lambda model: Evaluation(4, {"noise": torch.rand(()).item()}))


def make_failing(number: int, of: int) -> Client:
    def train(model: nn.Module, plan: LocalPlan) -> TrainResult:
        raise OSError("no such ward")

    return Scripted(train)


def make_unequal(number: int, of: int) -> Client:
    client = make_client(number, of)
    client.model = net(hidden=4 if number < of - 1 else 6)
    return client


def make_none(number: int, of: int) -> None:
    return None


def make_broken(number: int, of: int) -> Client:
    raise KeyError("ward 7")


def make_without_arguments() -> Client:
    return make_client(0, 1)


A_CLIENT = Scripted(careless_training)
A_NUMBER = 3


def make_tester() -> Client:
    return Scripted(careless_training, lambda model: Evaluation(4, {"accuracy": 0.25, "auc": 0.5}))


def make_mute_tester() -> Client:
    return Scripted(careless_training)


def app_of(name: str, n_clients: int = 6, *, has_data: bool = False, **arguments: object) -> ClientApp:
    return ClientApp.of(f"{HERE}:{name}", n_clients, 7, arguments, has_data=has_data)


def model_of(app: ClientApp) -> GlobalModel:
    state = ModelState.first(app.make_first(None).model.state_dict())
    return GlobalModel(state.layout, state.published)


def work_of(numbers: list[int], model: GlobalModel, steps_max: list[int] | None = None, **plan: Any) -> ClientsWork:
    """One round's work. `plan`: keys of the training plan."""
    run, sha256 = RunId("ward"), "0" * 64
    asked: dict[str, Any] = {"local_epochs": 2, "batch_size": 3, "learning_rate": 0.1, **plan}
    offer = Assignment(
        id=assignment_id(run, 2, 1, ClientId("client-0000000")),
        run=run,
        round=2,
        attempt=1,
        model=ModelRef(1, sha256, 1000, model.layout.digest),
        training=TrainingPlan(**asked),
        codec=CodecPlan(),
        grid=Grid(step=2.0**-20, max_abs=16.0, total_weight_max=1 << 20),
        sample_count_max=1000,
        seed=5,
        window_s=60.0,
    )
    seeds = np.array([1000 + number for number in numbers], dtype=np.uint64)
    stops = np.array(steps_max or [0] * len(numbers), dtype=np.int64)
    return ClientsWork(ClientGroup(np.array(numbers)), offer, seeds, stops, ClientStates())


class Remembering(Scripted):
    """Counts its rounds in `plan.state`, has a private tensor that moves, and says both in its metrics."""

    def __init__(self) -> None:
        super().__init__(careless_training, lambda model: Evaluation(4, {"own": model.get_buffer("own").sum().item()}))
        self.model.register_buffer("own", torch.zeros(2))

    def shares(self, name: str) -> TensorKind | None:
        return "private" if name == "own" else None

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        plan.state["rounds"] = [*plan.state.get("rounds", []), plan.round]
        model.get_buffer("own").add_(plan.round)
        done = super().train(model, plan)
        named = {
            "n": len(plan.state["rounds"]),
            "own": model.get_buffer("own")[0].item(),
            "is_named": plan.client != "",
        }
        return TrainResult(done.sample_count, done.steps_done, done.steps_planned, {**done.metrics, **named})


def make_remembering(number: int, of: int) -> Client:
    return Remembering()
