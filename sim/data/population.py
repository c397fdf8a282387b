"""A population: the clients of a simulated federation by number, and the data that each of them holds.

Clients are numbered from 0. Data are handed out for a whole cohort at once, in one piece: ten thousand data set objects
would take longer to make than ten thousand small models to train.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from umbel.aggregation.types import ClientId
from umbel.sim.data.partition import Indices
from umbel.sim.data.samples import Samples

_DIGITS = 7


@dataclass(frozen=True, slots=True)
class CohortData:
    """The data of some clients: the i-th of them holds `rows[starts[i]:starts[i + 1]]` of `samples`.

    `rows`: int64, indices into `samples`, of which some may be nobody's; `starts`: int64, one more than clients.
    """

    samples: Samples
    rows: Indices
    starts: Indices

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def sizes(self) -> Indices:
        return np.diff(self.starts)

    def of(self, position: int) -> Samples:
        """What the client at this position holds, copied."""
        return self.samples.take(self.rows[self.starts[position] : self.starts[position + 1]])


class Population(Protocol):
    """`n_clients`: numbered from 0. `test`: what no client holds, for measuring the model in one place."""

    @property
    def n_clients(self) -> int: ...
    @property
    def test(self) -> Samples: ...

    def sizes(self, clients: Indices) -> Indices:
        """How many samples each of these clients trains on: int64, at least 1."""
        ...

    def data_of(self, clients: Indices) -> CohortData:
        """What these clients train on, in their order."""
        ...

    def holdout_of(self, clients: Indices) -> CohortData | None:
        """What these clients hold back to measure models on; None where no client does."""
        ...


class ShardedPopulation:
    """Clients between whom one set of samples is dealt out. `shards`: indices into `train`, one array per client."""

    def __init__(
        self, train: Samples, shards: Sequence[Indices], test: Samples, holdouts: Sequence[Indices] | None = None
    ) -> None:
        self._train, self._test = train, test
        self._rows, self._starts = _joined(shards)
        self._holdout = None if holdouts is None else _joined(holdouts)
        if empty := int((np.diff(self._starts) < 1).sum()):
            raise ValueError(f"{empty} of {self.n_clients} clients hold no sample; deal to fewer clients")

    @property
    def n_clients(self) -> int:
        return len(self._starts) - 1

    @property
    def test(self) -> Samples:
        return self._test

    def sizes(self, clients: Indices) -> Indices:
        return self._starts[clients + 1] - self._starts[clients]

    def data_of(self, clients: Indices) -> CohortData:
        return _taken(self._train, self._rows, self._starts, clients)

    def holdout_of(self, clients: Indices) -> CohortData | None:
        return None if self._holdout is None else _taken(self._train, *self._holdout, clients)


def client_name(number: int) -> ClientId:
    """Names in the order of their numbers, up to ten million of them."""
    return ClientId(f"client-{number:0{_DIGITS}}")


def client_number(name: ClientId) -> int:
    """The inverse of `client_name`."""
    return int(name.removeprefix("client-"))


def _joined(shards: Sequence[Indices]) -> tuple[Indices, Indices]:
    starts = np.zeros(len(shards) + 1, dtype=np.int64)
    np.cumsum([len(shard) for shard in shards], out=starts[1:])
    return np.concatenate([np.empty(0, dtype=np.int64), *shards]), starts


def _taken(samples: Samples, rows: Indices, starts: Indices, clients: Indices) -> CohortData:
    firsts, sizes = starts[clients], starts[clients + 1] - starts[clients]
    taken = np.zeros(len(clients) + 1, dtype=np.int64)
    np.cumsum(sizes, out=taken[1:])
    where = np.arange(taken[-1]) + np.repeat(firsts - taken[:-1], sizes)
    return CohortData(samples, rows[where], taken)
