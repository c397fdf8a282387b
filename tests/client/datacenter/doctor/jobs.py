"""Jobs whose bottleneck is known, on any machine: what takes the time is a pause, or a sum of very many values."""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from umbel.client import Client, LocalPlan, TorchClient, TrainResult

HERE = "tests.client.datacenter.doctor.jobs"
PAUSE_S = 0.15
N_SENT = 1_000_000  # values that no step computes with
RUN_FILE = 'name = "job"\nrounds = { count = 1, target = 1 }\ntraining = { local_steps = 1, batch_size = 3 }\n'


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Twelve samples; `pause_s`: for which each is awaited."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self._pause_s = pause_s

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._pause_s)
        return torch.full((4,), float(index)), torch.tensor(index % 2)


class Small(nn.Module):
    """A layer, and values that are sent with it."""

    def __init__(self, n_sent: int = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.sent = nn.Parameter(torch.zeros(n_sent))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layer(inputs)
        return found


def _slow_loss(output: Tensor, target: Tensor) -> Tensor:
    time.sleep(PAUSE_S)
    return functional.cross_entropy(output, target)


def make_input_bound(number: int, of: int) -> Client:
    return TorchClient(Small(), nn.CrossEntropyLoss(), Samples(PAUSE_S / 3), device="cpu")


def make_compute_bound(number: int, of: int) -> Client:
    return TorchClient(Small(), _slow_loss, Samples(), device="cpu")


def make_communication_bound(number: int, of: int) -> Client:
    return TorchClient(Small(N_SENT), nn.CrossEntropyLoss(), Samples(), device="cpu")


class _Deaf(Client):
    """Never asks its plan whether it should stop."""

    def __init__(self) -> None:
        self.model, self.sample_count = Small(), 12

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        return TrainResult(self.sample_count, 1, 1, {})


def make_deaf(number: int, of: int) -> Client:
    return _Deaf()


class _Failing(TorchClient):
    """Has no memory for its second step."""

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        self.n_steps = getattr(self, "n_steps", 0) + 1
        if self.n_steps > 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().training_step(model, batch)


def make_failing_at_rank_1(number: int, of: int) -> Client:
    kind = _Failing if number == 1 else TorchClient
    return kind(Small(), nn.CrossEntropyLoss(), Samples(), device="cpu")
