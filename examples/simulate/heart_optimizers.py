"""Hospitals that train as FLamby's clients do: a given first model, and batches that go on where the last round ended.

Used by `heart-optimizers.toml`. The run's seed is torch's while client 0 is made, so the first model is torch's own
initialisation under that seed.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from umbel.client import LocalPlan, TorchClient, TrainResult
from umbel.sim.engines.clients.app import ClientShare
from umbel.sim.models import TwoClassRegression

N_INPUTS = 13


class EndlessBatches:
    """Batches of pass after pass, from batch number `place` on.

    Each pass has a new order, and its last batch is shorter if the samples do not suffice.
    """

    def __init__(self, data: TensorDataset) -> None:
        self._data = data
        self.batch_size, self.seed, self.place = 1, 0, 0

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        n_in_pass = -(-len(self._data) // self.batch_size)
        number, n_skipped = divmod(self.place, n_in_pass)
        while True:
            draw = torch.Generator().manual_seed(self.seed + number)
            order = torch.randperm(len(self._data), generator=draw)
            for batch in torch.split(order, self.batch_size)[n_skipped:]:
                yield self._data[batch]
            number, n_skipped = number + 1, 0


class Hospital(TorchClient):
    """A hospital that keeps its place in its batches in `plan.state`."""

    def __init__(self, model: nn.Module, data: ClientShare) -> None:
        self._batches = EndlessBatches(data.train)
        super().__init__(model, "classes", self._batches, data.holdout, device="cpu", sample_count=len(data.train))

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        # The first round's seed decides the order of all rounds. Passes are numbered from it, below torch's limit.
        self._batches.seed = plan.state.setdefault("seed", plan.seed >> 2)
        self._batches.batch_size, self._batches.place = plan.batch_size, plan.state.get("place", 0)
        result = super().train(model, plan)
        plan.state["place"] = self._batches.place + result.steps_done
        return result


def make_client(number: int, of: int, data: ClientShare) -> Hospital:
    return Hospital(TwoClassRegression(N_INPUTS), data)
