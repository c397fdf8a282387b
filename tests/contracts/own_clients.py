"""Clients as sites write them, for a run over HTTP and for an experiment's `[clients]`: `make_...(number, of)`.

- `make_torch_client`: the ready trainer.
- `make_own_loop`: a loop of its own, with FedProx's term.
- `make_measuring_client`: batches of five, whatever the plan asks for; trains on a part of its samples, and measures
  the model on the others.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.contracts.scripted_federation import MODEL, own_data
from umbel.client import Client, Evaluation, LocalPlan, TorchClient, TrainResult

HERE = "tests.contracts.own_clients"
_OWN_BATCH, _HELD_BACK = 5, 2


def make_torch_client(number: int, of: int) -> TorchClient:
    return TorchClient(MODEL.make(), nn.CrossEntropyLoss(), own_data(number), device="cpu")


def make_own_loop(number: int, of: int) -> Client:
    return _OwnLoop(number)


def make_measuring_client(number: int, of: int) -> Client:
    return _MeasuringClient(number)


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
        loss = functional.cross_entropy(scores, self.held.targets)
        return Evaluation(_HELD_BACK, {"loss": loss.item(), "spread": scores.std().item()})
