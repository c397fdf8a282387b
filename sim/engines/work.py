"""The work of an engine, the local training of a whole cohort, and its result."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.aggregation.algorithms.names import Algorithm
from umbel.aggregation.plans.codec import Codec, CodecPlan
from umbel.aggregation.plans.training import TrainingPlan
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import CohortData


@dataclass(frozen=True, slots=True)
class CohortWork:
    """The local training of a cohort, each client from the same model.

    `seeds`: uint64, of each client, for the order of its samples (`aggregation.sample_order`), dropout and the like.
    `steps`: int64, how many steps of SGD each takes, at least 1, through its data pass after pass, in batches as the
    SDK makes them (`client.local.batches.split_sizes`).
    """

    data: CohortData
    seeds: NDArray[np.uint64]
    steps: Indices
    plan: TrainingPlan
    codec: CodecPlan = field(default_factory=CodecPlan)  # if it sends only part of a model, clients train within that
    pulls: Tensor | None = None  # float32 (clients, n_values): what FedDyn or SCAFFOLD adds to each client's gradients

    @property
    def terms(self) -> dict[str, Any]:
        """What all clients share, as JSON can carry it; `CohortWork.on` is the inverse."""
        # Engines need neither a schedule nor a rule for mu. "fedprox" without that rule could not have the mu 0.
        algorithm: Algorithm = "fedavg" if self.plan.algorithm == "fedprox" else self.plan.algorithm
        plan = replace(self.plan, rate_plan=None, mu_rule=None, algorithm=algorithm)
        return {"plan": asdict(plan), "codec": asdict(self.codec)}

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """What each client has of its own."""
        return [self.seeds, self.steps, *([] if self.pulls is None else [self.pulls.numpy()])]

    @staticmethod
    def on(data: CohortData, arrays: Sequence[NDArray[Any]], terms: Mapping[str, Any]) -> "CohortWork":
        """Work on these terms. `arrays`: those of another work."""
        seeds, steps, *pulls = arrays
        codec: dict[str, Any] = {**terms["codec"], "codec": Codec(terms["codec"]["codec"])}
        of_each = torch.from_numpy(pulls[0].copy()) if pulls else None
        return CohortWork(data, seeds, steps, TrainingPlan(**terms["plan"]), CodecPlan(**codec), of_each)


@dataclass(frozen=True, slots=True)
class Changes:
    """The weight changes of some clients of the cohort. Read `values` before you ask for the next: memory is reused."""

    positions: Indices  # int64 (k,), in the cohort
    values: Tensor  # float32 (k, n_values), local minus global weights in layout order; real clients: what they send
    loss: NDArray[np.float64]  # (k,), the mean over each client's samples during training
    first_loss: NDArray[np.float64]  # (k,), of the first step
    last_loss: NDArray[np.float64]


class Engine(Protocol):
    """Trains cohorts. `name`: as in an experiment's file."""

    @property
    def name(self) -> str: ...

    def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        """Train every client of the cohort from `start` (float32, in layout order). Each is in one of the changes.

        The same work gives the same changes, however they are grouped. Raises `EngineError` for work it cannot do.
        """
        ...

    def close(self) -> None:
        """Release processes and memory."""
        ...


class EngineError(Exception):
    """Why an engine cannot train this model, and what to do, in one sentence."""
