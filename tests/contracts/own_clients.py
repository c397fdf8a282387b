"""Clients as sites write them, for a run over HTTP and for an experiment's `[clients]`: `make_...(number, of)`.

- `make_torch_client`: the ready trainer.
- `make_own_loop`: a loop of its own, with FedProx's term.
- `make_array_client`: named numpy arrays, whose gradients another library computes.
- `make_measuring_client`: batches of five, whatever the plan asks for; trains on a part of its samples, and measures
  the model on the others.
- `make_remembering_client`: driven by its plan, with an optimizer that goes on from round to round in `plan.state`.
- `make_adapted_client`: trains and sends the last layer; the rest is a base that each site has.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.data import Dataset

from tests.contracts.scripted_federation import MODEL, own_data
from umbel.aggregation.plans.tensors import TensorKind
from umbel.client import ArrayClient, ArrayData, Client, Evaluation, LocalPlan, TorchClient, TrainResult, WeightedMean

HERE = "tests.contracts.own_clients"
_OWN_BATCH, _HELD_BACK = 5, 2


def make_torch_client(number: int, of: int) -> TorchClient:
    return TorchClient(MODEL.make(), nn.CrossEntropyLoss(), own_data(number), device="cpu")


def make_own_loop(number: int, of: int) -> Client:
    return _OwnLoop(number)


def make_array_client(number: int, of: int) -> Client:
    return _ArrayLoop(number)


def make_measuring_client(number: int, of: int) -> Client:
    return _MeasuringClient(number)


def make_remembering_client(number: int, of: int) -> Client:
    return _RememberingClient(number)


def make_adapted_client(number: int, of: int) -> Client:
    return _AdaptedClient(number)


@dataclass(frozen=True, slots=True)
class _Samples:
    inputs: Tensor
    targets: Tensor


class _OwnLoop(Client):
    """Draws its batches and its dropout from the plan's seed."""

    def __init__(self, number: int) -> None:
        self.model = MODEL.make()
        self.samples = _Samples(*own_data(number).tensors)
        self.sample_count = len(self.samples.targets)

    def batch_size(self, plan: LocalPlan) -> int:
        return plan.batch_size

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        torch.manual_seed(plan.seed)
        n, size = len(self.samples.targets), self.batch_size(plan)
        planned = plan.steps_for(-(-n // size))
        optimizer = torch.optim.Adam(model.parameters(), lr=plan.learning_rate / 10)
        done, losses = 0, list[float]()
        model.train()
        while True:
            for rows in torch.randperm(n).split(size):
                if len(rows) == 1:
                    rows = torch.cat([rows, rows])  # batch normalization needs two
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(self.samples.inputs[rows]), self.samples.targets[rows])
                loss.backward()
                plan.adjust_gradients(model)
                optimizer.step()
                losses.append(loss.item())
                done += 1
                if done == planned or plan.should_stop():
                    return TrainResult(n, done, planned, {"loss": sum(losses) / done, "last": losses[-1]})


class _ArrayLoop(ArrayClient):
    """The network of the others as arrays. torch's functional calls stand for the other library."""

    def __init__(self, number: int) -> None:
        self._network = MODEL.make()
        data = own_data(number)
        super().__init__({name: one.numpy() for name, one in self._network.state_dict().items()}, len(data))
        self.data = ArrayData(*(tensor.numpy() for tensor in data.tensors))

    def train_arrays(self, arrays: dict[str, Any], plan: LocalPlan) -> tuple[Any, TrainResult]:
        steps = plan.drive(self.data, keep={"arrays": arrays})
        for batch in steps:
            loss, gradients = self._loss_and_gradients(arrays, *map(torch.from_numpy, batch))
            for name, gradient in plan.adjust_arrays(gradients, arrays).items():
                arrays[name] -= np.float32(plan.learning_rate) * gradient
            steps.note(loss=loss, last=loss)
        return arrays, steps.result(self.sample_count)

    def _loss_and_gradients(
        self, arrays: dict[str, Any], inputs: Tensor, targets: Tensor
    ) -> tuple[float, dict[str, Any]]:
        """Running statistics move in `arrays` themselves."""
        values = {name: torch.from_numpy(one) for name, one in arrays.items()}
        trained = {name: values[name].requires_grad_() for name, _ in self._network.named_parameters()}
        loss = functional.cross_entropy(functional_call(self._network, values, (inputs,)), targets)
        gradients = torch.autograd.grad(loss, list(trained.values()))
        return loss.item(), {name: one.numpy() for name, one in zip(trained, gradients, strict=True)}


class _MeasuringClient(_OwnLoop):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        inputs, targets = self.samples.inputs, self.samples.targets
        self.held = _Samples(inputs[:_HELD_BACK], targets[:_HELD_BACK])
        self.samples = _Samples(inputs[_HELD_BACK:], targets[_HELD_BACK:])

    def batch_size(self, plan: LocalPlan) -> int:
        return _OWN_BATCH

    def evaluate(self, model: nn.Module) -> Evaluation:
        model.eval()
        with torch.no_grad():
            scores = model(self.held.inputs)
        loss, is_first = functional.cross_entropy(scores, self.held.targets), self.held.targets == 0
        recall = WeightedMean((scores.argmax(1) == 0)[is_first].float().mean(), int(is_first.sum()))
        return Evaluation(_HELD_BACK, {"loss": loss.item(), "spread": scores.std().item(), "recall": recall})


class _Named(Dataset[dict[str, Tensor]]):
    """The samples of a client, with names."""

    def __init__(self, number: int) -> None:
        self._samples = own_data(number)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, target = self._samples[index]
        return {"values": inputs, "group": target}


class _RememberingClient(Client):
    """Its optimizer begins a round with the moments of its last one, and says how many rounds that were."""

    def __init__(self, number: int) -> None:
        self.model, self.data = MODEL.make(), _Named(number)
        self.sample_count = len(self.data)

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        optimizer = plan.make_optimizer(model.train())
        if "moments" in plan.state:
            optimizer.load_state_dict({**optimizer.state_dict(), "state": plan.state["moments"]})
        steps = plan.drive(self.data, keep={"model": model, "optimizer": optimizer})
        for batch in steps:
            optimizer.zero_grad()
            scores, smoothing = model(batch["values"]), float(plan.options.get("smoothing", 0.0)) / plan.round
            loss = functional.cross_entropy(scores, batch["group"], label_smoothing=smoothing)
            loss.backward()
            plan.adjust_gradients(model)
            optimizer.step()
            steps.note(loss=loss)
        plan.state["moments"] = optimizer.state_dict()["state"]
        plan.state["rounds"] = plan.state.get("rounds", 0) + 1
        return steps.result(self.sample_count, {"rounds": plan.state["rounds"]})


class _AdaptedClient(TorchClient):
    def __init__(self, number: int) -> None:
        super().__init__(MODEL.make(), "classes", own_data(number), device="cpu")
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self.shares(name) is None)

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        model.get_submodule("1").eval()  # its statistics are part of the base
        loss, _ = self._forward(model, batch)
        return loss

    def shares(self, name: str) -> TensorKind | None:
        return None if name.startswith("4.") else "base"
