"""The engine "sequential": one client after another, in this process. The others are measured against it."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from umbel.sim.engines.device import whole_float32
from umbel.sim.engines.local.threads import one_thread
from umbel.sim.engines.local.training import Arithmetic, LocalTrainer, changes_of
from umbel.sim.engines.recipe import ModelRecipe
from umbel.sim.engines.schedule import rows_of_block
from umbel.sim.engines.work import Changes, CohortWork


class SequentialEngine:
    """Trains on `device`, with one thread of torch's own; `arithmetic`: as `LocalTrainer` has it."""

    name = "sequential"

    def __init__(self, recipe: ModelRecipe, device: str = "cpu", arithmetic: Arithmetic = "auto") -> None:
        self._trainer = LocalTrainer(recipe, device, arithmetic)
        n_values = self._trainer.layout.n_values
        self._values = torch.empty(rows_of_block(n_values), n_values)

    def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        """As `Engine.train`: in the order of the cohort."""
        self._trainer.begin(start, work)
        for first in range(0, len(work.data), len(self._values)):
            positions = np.arange(first, min(first + len(self._values), len(work.data)))
            with one_thread(), whole_float32(self._trainer.device):
                losses = self._trainer.train(work, positions, self._values)
            yield changes_of(positions, self._values[: len(positions)], losses)

    def close(self) -> None:
        """Nothing is held."""
