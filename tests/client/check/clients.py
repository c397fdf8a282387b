"""A correct client with a loop of its own, of which each broken client of these tests changes one thing."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from umbel.client import Client, Evaluation, LocalPlan, TrainResult
from umbel.client.local.steps import LocalSteps

N = 24


def data(seed: int) -> TensorDataset:
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(N, 4, generator=rng)
    return TensorDataset(inputs, (inputs.sum(1) > 0).to(torch.int64))


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 2))


class Ward(Client):
    """Trains in `plan.drive`. A broken client overrides one of its methods."""

    def __init__(self, seed: int = 0) -> None:
        self.model, self.data, self.holdout = network(seed), data(seed), data(seed + 1)
        self.sample_count = N

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        self.begin(model)
        optimizer = torch.optim.SGD(model.parameters(), plan.learning_rate, momentum=0.9)
        steps = plan.drive(self.data, keep=self.kept(model, optimizer))
        for batch in steps:
            self.step(model, optimizer, plan, steps, batch)
        return self.returned(steps)

    def begin(self, model: nn.Module) -> None:
        model.train()

    def kept(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": model, "optimizer": optimizer}

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, plan: LocalPlan, steps: LocalSteps, batch: Any
    ) -> None:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        self.adjust(model, plan)
        optimizer.step()
        steps.note(loss=loss)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, target = batch
        return nn.functional.cross_entropy(model(inputs), target)

    def adjust(self, model: nn.Module, plan: LocalPlan) -> None:
        plan.adjust_gradients(model)

    def returned(self, steps: LocalSteps) -> TrainResult:
        return steps.result(self.sample_count)

    def evaluate(self, model: nn.Module) -> Evaluation | None:
        model.eval()
        inputs, target = self.holdout.tensors
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(inputs), target)
        return Evaluation(N, {"loss": float(loss)})


class Bare(Ward):
    """Trains in a loop without `plan.drive`, seeds by itself, and saves no checkpoint."""

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        model.train()
        before, rng = torch.get_rng_state(), torch.Generator().manual_seed(plan.seed)
        torch.manual_seed(plan.seed)
        optimizer = torch.optim.SGD(model.parameters(), plan.learning_rate)
        planned, done = plan.steps_for(1), 0
        while done < planned and not (done and self.is_over(plan)):
            optimizer.zero_grad()
            self.loss(model, self.batch(rng)).backward()
            self.adjust(model, plan)
            optimizer.step()
            done += 1
        torch.set_rng_state(before)
        return TrainResult(self.sample_count, done, planned)

    def is_over(self, plan: LocalPlan) -> bool:
        return plan.should_stop() is not None

    def batch(self, rng: torch.Generator) -> tuple[Tensor, ...]:
        chosen = torch.randperm(N, generator=rng)[:8]
        return tuple(tensor[chosen] for tensor in self.data.tensors)
