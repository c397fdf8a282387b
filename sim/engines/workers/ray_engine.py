"""The engine "ray": divides clients among the actors of a Ray cluster (`ray_cluster.py`).

Each actor holds one resident model. Samples go into Ray's object store once, the start once for each cohort. An actor
gets the clients to train and their rows, and returns a block of changes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.aggregation.model.layout import Layout
from umbel.client.local.devices import whole_float32
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import CohortData
from umbel.sim.engines.device import chunks, one_thread, part_of, rows_of_block
from umbel.sim.engines.model import ModelRecipe
from umbel.sim.engines.training import Arithmetic, LocalTrainer, Losses, changes_of, require_trainable
from umbel.sim.engines.work import Changes, CohortWork
from umbel.sim.engines.workers.ray_cluster import (
    RayCluster,
    dtypes_of,
    packed,
    unpacked,
    unpacked_samples,
    use_paths,
)


class RayWorker:
    """`paths`: of the caller's modules."""

    def __init__(self, paths: Sequence[str], _n_actors: int, recipe: str, device: str, arithmetic: Arithmetic) -> None:
        use_paths(paths)
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
        """Train some clients of a cohort; their changes (k, n_values) and losses (k, 3)."""
        rows, starts, *of_clients = part
        samples = unpacked_samples(inputs, targets, terms["dtypes"])
        work = CohortWork.on(CohortData(samples, rows, starts), of_clients, terms)
        values = torch.empty(len(work.steps), self._trainer.layout.n_values)
        with one_thread(), whole_float32(self._trainer.device):
            if cohort != self._cohort:
                self._trainer.begin(unpacked(start, "float32"), work)
                self._cohort = cohort
            losses = self._trainer.train(work, np.arange(len(work.steps)), values)
        return values.numpy(), losses


class RayEngine:
    """Samples are sent when they are first seen and must not be changed in place afterwards. `n_workers`, `address` and
    errors: as of `RayCluster`.
    """

    name = "ray"

    def __init__(
        self,
        recipe: ModelRecipe,
        n_workers: int | None = None,
        device: str = "cpu",
        arithmetic: Arithmetic = "auto",
        address: str | None = None,
    ) -> None:
        arguments = recipe.to_json(), "cuda:0" if device == "cuda" else device, arithmetic
        self._cluster = RayCluster(RayWorker, arguments, n_workers, device, address)
        self._layout = Layout.of_state(recipe.make().state_dict())
        self._rows = rows_of_block(self._layout.n_values)
        self._cohort = 0

    def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        """As `Engine.train`. One cohort at a time."""
        require_trainable(work, start, self._layout)
        self._cohort += 1
        common = self._cohort, self._cluster.put(packed(start)), *self._cluster.samples(work.data.samples)

        def begin(actor: Any, positions: Indices) -> Any:
            return actor.train.remote(*common, *_message(part_of(work, positions)))

        waiting = chunks(work.steps, len(self._cluster), self._rows)
        for positions, (values, losses) in self._cluster.run(waiting, begin):
            yield changes_of(positions, torch.from_numpy(values.copy()), losses.copy())

    def close(self) -> None:
        """End the actors, and Ray if this engine has started it."""
        self._cluster.close()


def _message(part: CohortWork) -> tuple[list[Any], dict[str, Any]]:
    terms = {**part.terms, "dtypes": dtypes_of(part.data.samples)}
    return [part.data.rows, part.data.starts, *part.arrays], terms
