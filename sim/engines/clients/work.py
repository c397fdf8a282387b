"""What simulated clients are asked, and what they answer, as one process tells it to another."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import State
from umbel.aggregation.plans.assignment import Assignment, assignment_id
from umbel.aggregation.reports import EvaluationDone, WorkDone
from umbel.aggregation.types import client_name
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import CohortData, Population
from umbel.sim.engines.clients.app import ClientShare
from umbel.sim.engines.clients.states import ClientStates


@dataclass(frozen=True, slots=True)
class ClientGroup:
    """Some clients by number, with their shares of the data; without `train` they bring their own.

    `held` is of the same samples as `train`.
    """

    numbers: Indices
    train: CohortData | None = None
    held: CohortData | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def effort(self) -> Indices:
        """How much each client has to do, for the division among processes: int64 (k,), at least 1."""
        if self.train is None:
            return np.ones(len(self.numbers), dtype=np.int64)
        return np.maximum(1, self.train.sizes)

    def part(self, positions: Indices) -> "ClientGroup":
        """The clients at these positions, in this order."""
        train, held = (None if data is None else data.part(positions) for data in (self.train, self.held))
        return ClientGroup(self.numbers[positions], train, held)

    def share(self, position: int) -> ClientShare | None:
        """A copy of the data of the client at this position."""
        if self.train is None:
            return None
        held = None if self.held is None or not self.held.sizes[position] else self.held.of(position).pairs
        return ClientShare(self.train.of(position).pairs, held)

    @classmethod
    def dealt(cls, numbers: Indices, data: Population | None) -> "ClientGroup":
        """These clients with what `data` deals out to them; None: they bring their own."""
        if data is None:
            return cls(numbers)
        train, held = data.data_of(numbers), data.holdout_of(numbers)
        return cls(numbers, train) if held is None else cls(numbers, *_of_same_samples(train, held))


def _of_same_samples(train: CohortData, held: CohortData) -> tuple[CohortData, CohortData]:
    """Both over one set of samples."""
    if train.samples.inputs is held.samples.inputs and train.samples.targets is held.samples.targets:
        return train, held
    pairs = ((one.samples.inputs, one.samples.targets) for one in (train, held))
    samples = SampleSet(*(torch.cat(parts) for parts in zip(*pairs, strict=True)))
    moved = CohortData(samples, held.rows + len(train.samples), held.starts)
    return CohortData(samples, train.rows, train.starts), moved


@dataclass(frozen=True, slots=True)
class ClientsWork:
    """The assignments of some clients. `offer`: what they have in common; `seeds`: uint64 (k,), of each.

    `steps_max`: int64 (k,), the number of steps after which a client is told to stop; 0: it is never told. `states`:
    where clients keep what they need in later rounds.
    """

    group: ClientGroup
    offer: Assignment
    seeds: NDArray[np.uint64]
    steps_max: Indices
    states: ClientStates

    def __len__(self) -> int:
        return len(self.group)

    def part(self, positions: Indices) -> "ClientsWork":
        """The work of the clients at these positions, in this order."""
        seeds, steps_max = self.seeds[positions], self.steps_max[positions]
        return ClientsWork(self.group.part(positions), self.offer, seeds, steps_max, self.states)

    def offer_of(self, position: int) -> Assignment:
        """The assignment that a coordinator would send this client."""
        offer, client = self.offer, client_name(int(self.group.numbers[position]))
        own = assignment_id(offer.run, offer.round, offer.attempt, client, offer.task)
        return replace(offer, id=own, seed=int(self.seeds[position]))


@dataclass(frozen=True, slots=True)
class ClientReport:
    """What a client answers. `work` None: it declines, for the reason `refusal`, in the words of production."""

    work: WorkDone | EvaluationDone | None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class TrainedClients:
    """The results of some clients of the cohort. Read `values` before you ask for the next: memory is reused."""

    positions: Indices  # int64 (k,), in the cohort
    values: Tensor  # float32 (k, `layout.update.n_values`): weight changes; of one that declines, anything
    reports: Sequence[ClientReport]


@dataclass(frozen=True, slots=True)
class GlobalModel:
    """The model that clients fetch. `owned`: as published, by the names of the tensors that own their values."""

    layout: Layout
    owned: State

    @property
    def n_sent(self) -> int:
        """The number of values that clients send."""
        return self.layout.update.n_values


class ClientsEngine(Protocol):
    """Runs simulated clients. `name`: as in an experiment's file; `why`: why it was chosen, in words.

    The same work gives the same results, however clients are divided among processes. Every method raises
    `EngineError` if a client's own code fails.
    """

    @property
    def name(self) -> str: ...
    @property
    def why(self) -> str: ...

    def sizes(self, group: ClientGroup) -> Indices:
        """How many samples each client says that it has (`Client.sample_count`): int64 (k,)."""
        ...

    def train(self, model: GlobalModel, work: ClientsWork) -> Iterator[TrainedClients]:
        """Have every client train. Each is in one of the results."""
        ...

    def measure(self, model: GlobalModel, work: ClientsWork) -> list[ClientReport]:
        """Have every client measure the model on its held-out data; in the order of the work."""
        ...

    def close(self) -> None:
        """Release processes and memory."""
        ...
