"""What runs in the actors of the engine "ray"; this module knows nothing of Ray itself."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.sim.data.population import CohortData
from umbel.sim.data.samples import Samples
from umbel.sim.engines.device import whole_float32
from umbel.sim.engines.local.threads import one_thread
from umbel.sim.engines.local.training import Arithmetic, LocalTrainer, Losses
from umbel.sim.engines.recipe import ModelRecipe
from umbel.sim.engines.work import CohortWork


def packed(tensor: Tensor) -> NDArray[np.uint8]:
    """A tensor's bytes, (..., bytes of the last dimension): numpy lacks some of torch's types."""
    return tensor.detach().cpu().contiguous().unsqueeze(-1).view(torch.uint8).numpy()


def unpacked(array: NDArray[np.uint8], dtype: str) -> Tensor:
    """The inverse, without a copy: not to be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array).view(getattr(torch, dtype)).squeeze(-1)


class RayWorker:
    """`paths`: where the caller's modules are, on a node that has them there too."""

    def __init__(self, recipe: str, device: str, arithmetic: Arithmetic, paths: Sequence[str]) -> None:
        sys.path.extend(path for path in paths if path not in sys.path)
        self._trainer = LocalTrainer(ModelRecipe.from_json(recipe), device, arithmetic)
        self._cohort: int | None = None

    def train(
        self,
        cohort: int,
        start: NDArray[np.uint8],
        inputs: NDArray[np.uint8],
        targets: NDArray[np.uint8],
        part: Sequence[NDArray[Any]],
        terms: Mapping[str, Any],
    ) -> tuple[NDArray[np.float32], Losses]:
        """Train some clients of a cohort: what they have changed (k, n_values), and their losses (k, 3)."""
        rows, starts, seeds, steps = part
        samples = Samples(*map(unpacked, (inputs, targets), terms["dtypes"]))
        work = CohortWork.on(CohortData(samples, rows, starts), seeds, steps, terms)
        values = torch.empty(len(seeds), self._trainer.layout.n_values)
        with one_thread(), whole_float32(self._trainer.device):
            if cohort != self._cohort:
                self._trainer.begin(unpacked(start, "float32"), work)
                self._cohort = cohort
            losses = self._trainer.train(work, np.arange(len(seeds)), values)
        return values.numpy(), losses
