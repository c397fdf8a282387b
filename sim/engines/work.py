"""What an engine is given, and what it gives back: the local training of a whole cohort."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from umbel.aggregation.plans.codec import Codec, CodecPlan
from umbel.aggregation.plans.round import TrainingPlan
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import CohortData


@dataclass(frozen=True, slots=True)
class LocalOptimizer:
    """A client's own SGD, as torch has it. `clip_norm`: greatest L2 norm of a step's gradient; None: not clipped."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None


@dataclass(frozen=True, slots=True)
class CohortWork:
    """What the clients of a cohort are to do, each from the same model.

    `seeds`: uint64, of each client, for the order of its samples (`aggregation.sample_order`), dropout and the like.
    `steps`: int64, how many steps of SGD each takes, at least 1; they go through its data pass after pass, in batches
    as the SDK makes them (`client.batches.split_sizes`). `plan`: batch size, learning rate, FedProx's mu. `codec`: how
    updates are written; where they can carry a part of the model alone, clients train within that (`projections`).
    `clients`: int64, the number of each; none where an engine need not know who they are.
    """

    data: CohortData
    seeds: NDArray[np.uint64]
    steps: Indices
    plan: TrainingPlan
    optimizer: LocalOptimizer = field(default_factory=LocalOptimizer)
    codec: CodecPlan = field(default_factory=CodecPlan)
    clients: Indices = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def terms(self) -> dict[str, Any]:
        """What is alike for all of them, as JSON can carry it; `CohortWork.on` is the inverse."""
        return {"plan": asdict(self.plan), "optimizer": asdict(self.optimizer), "codec": asdict(self.codec)}

    @staticmethod
    def on(data: CohortData, seeds: NDArray[np.uint64], steps: Indices, terms: Mapping[str, Any]) -> "CohortWork":
        """Work on these terms."""
        codec: dict[str, Any] = {**terms["codec"], "codec": Codec(terms["codec"]["codec"])}
        plan, optimizer = TrainingPlan(**terms["plan"]), LocalOptimizer(**terms["optimizer"])
        return CohortWork(data, seeds, steps, plan, optimizer, CodecPlan(**codec))


@dataclass(frozen=True, slots=True)
class Changes:
    """What some clients of the cohort have made of the model.

    `positions`: int64 (k,), which they are in the cohort. `values`: float32 (k, n_values), local minus global weights
    in layout order; to read before the next is asked for, as its memory is used again. `loss`: float64 (k,), the mean
    over what each has trained on, as it was in training; `first_loss`, `last_loss`: of the first step, and the last.
    """

    positions: Indices
    values: Tensor
    loss: NDArray[np.float64]
    first_loss: NDArray[np.float64]
    last_loss: NDArray[np.float64]


class Engine(Protocol):
    """Trains cohorts. `name`: as an experiment's file calls it."""

    @property
    def name(self) -> str: ...

    def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        """Train every client of the cohort from `start` (float32, in layout order): each is in one of the changes.

        The same work gives the same changes, in whatever groups they come. Raises `EngineError` where it cannot.
        """
        ...

    def close(self) -> None:
        """Let go of processes and memory."""
        ...


class EngineError(Exception):
    """One sentence that says why an engine cannot train this model, and what to do."""
