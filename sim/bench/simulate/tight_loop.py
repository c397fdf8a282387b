"""The plain loop that a simulator has to beat: one model, one client after another, slices of tensors, `torch.optim`.

What a careful person writes without any framework: nothing is copied that need not be, no loader, no object a client,
one thread of torch's own. It sees the same samples in the same batches as the simulator, in the order that
`aggregation/sample_order.py` draws, and takes the mean of the clients' weights by their samples.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from umbel.aggregation.plans.round import TrainingPlan
from umbel.aggregation.sample_order import sample_order
from umbel.client.training.batches import split_sizes
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import CohortData


class TightLoop:
    """Trains rounds of a model. `state`: its weights now, one vector in the order of `parameters()`."""

    def __init__(self, model: nn.Module, plan: TrainingPlan) -> None:
        self._model, self._plan = model, plan
        self._parameters = list(model.parameters())
        self.state = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        self._optimizer = torch.optim.SGD(self._parameters, lr=plan.learning_rate)

    def round(self, data: CohortData, seeds: Sequence[int]) -> None:
        """Every client of the cohort, and the mean."""
        self.move(self.sum_of(data, seeds, np.arange(len(data))), int(data.sizes.sum()))

    def sum_of(self, data: CohortData, seeds: Sequence[int], positions: Indices) -> Tensor:
        """The sum of the weights of some clients, times their samples."""
        total = torch.zeros_like(self.state)
        for position in positions.tolist():
            total.add_(self.trained(data, position, seeds[position]), alpha=int(data.sizes[position]))
        return total

    def move(self, total: Tensor, n_samples: int) -> None:
        """To the mean."""
        self.state = total / n_samples

    def trained(self, data: CohortData, position: int, seed: int) -> Tensor:
        """The weights of one client after its work."""
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(self.state.clone(), self._parameters)
        own = data.of(position)
        for rows in steps_of(seed, len(own), self._plan):
            self._optimizer.zero_grad()
            functional.cross_entropy(self._model(own.inputs[rows]), own.targets[rows]).backward()
            self._optimizer.step()
        with torch.no_grad():
            return torch.cat([p.reshape(-1) for p in self._parameters])


def steps_of(seed: int, n_samples: int, plan: TrainingPlan) -> Iterator[Tensor]:
    """Which of its samples a client sees in each of its steps, of all epochs: int64, numbers of its own samples."""
    sizes = split_sizes(n_samples, plan.batch_size)
    for epoch in range(plan.local_epochs or 1):
        yield from torch.from_numpy(sample_order(seed, epoch, n_samples)).split(sizes)
