"""A population: the clients of a simulated federation by number, and the data that each of them holds.

Clients are numbered from 0. The data of a cohort come in one piece: making ten thousand data set objects would take
longer than training ten thousand small models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.partition.partition import Indices, Transform


@dataclass(frozen=True, slots=True)
class CohortData:
    """The data of some clients: the i-th of them holds `rows[starts[i]:starts[i + 1]]` of `samples`.

    `rows`: int64, indices into `samples`; `starts`: int64, one more than clients.
    """

    samples: SampleSet
    rows: Indices
    starts: Indices

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def sizes(self) -> Indices:
        return np.diff(self.starts)

    def part(self, positions: Indices) -> "CohortData":
        """The data of the clients at these positions, in this order, of the same samples."""
        firsts, sizes = self.starts[positions], self.sizes_of(positions)
        starts = starts_of(sizes)
        where = np.arange(starts[-1]) + np.repeat(firsts - starts[:-1], sizes)
        return CohortData(self.samples, self.rows[where], starts)

    def sizes_of(self, positions: Indices) -> Indices:
        return self.starts[positions + 1] - self.starts[positions]

    def of(self, position: int) -> SampleSet:
        """A copy of the data of the client at this position."""
        return self.samples.take(self.rows[self.starts[position] : self.starts[position + 1]])


def starts_of(sizes: Indices) -> Indices:
    """Where each client's samples start if they follow each other, and where the last ones end: int64 (n + 1,)."""
    starts = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


class Population(Protocol):
    """Clients, numbered from 0. `test`: held by no client, to measure the model in one place."""

    @property
    def n_clients(self) -> int: ...
    @property
    def test(self) -> SampleSet: ...

    def sizes(self, clients: Indices) -> Indices:
        """How many samples each of these clients trains on: int64, at least 1."""
        ...

    def data_of(self, clients: Indices) -> CohortData:
        """The training data of these clients, in their order."""
        ...

    def holdout_of(self, clients: Indices) -> CohortData | None:
        """What these clients hold back to measure models on; None if no client does."""
        ...


class ShardedPopulation:
    """Clients among which one set of samples is divided. `shards`: indices into `train`, one array per client.

    `transform`: of each client's inputs.
    """

    def __init__(
        self,
        train: SampleSet,
        shards: Sequence[Indices],
        test: SampleSet,
        holdouts: Sequence[Indices] | None = None,
        transform: Transform | None = None,
    ) -> None:
        self._test, self._transform = test, transform
        self._data = _joined(train, shards)
        self._held = None if holdouts is None else _joined(train, holdouts)
        if empty := int((self._data.sizes < 1).sum()):
            raise ValueError(f"{empty} of {self.n_clients} clients hold no sample; use fewer clients")

    @property
    def n_clients(self) -> int:
        return len(self._data)

    @property
    def test(self) -> SampleSet:
        return self._test

    def sizes(self, clients: Indices) -> Indices:
        return self._data.sizes_of(clients)

    def data_of(self, clients: Indices) -> CohortData:
        return self._as_seen(self._data.part(clients), clients, are_held_back=False)

    def holdout_of(self, clients: Indices) -> CohortData | None:
        return None if self._held is None else self._as_seen(self._held.part(clients), clients, are_held_back=True)

    def _as_seen(self, data: CohortData, clients: Indices, *, are_held_back: bool) -> CohortData:
        if self._transform is None:
            return data
        copied = data.samples.take(data.rows)
        inputs = self._transform(copied.inputs, clients, data.starts, are_held_back=are_held_back)
        return CohortData(SampleSet(inputs, copied.targets), np.arange(len(data.rows)), data.starts)


def _joined(samples: SampleSet, shards: Sequence[Indices]) -> CohortData:
    rows = np.concatenate([np.empty(0, dtype=np.int64), *shards])
    return CohortData(samples, rows, starts_of(np.array([len(shard) for shard in shards], dtype=np.int64)))
