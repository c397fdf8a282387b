"""The graph of a secure round: each client shares masks and secrets with its neighbours.

Complete: every client with every other. Sparse (Bell, Bonawitz, Gascon, Lepoint and Raykova 2020, "Secure Single-Server
Aggregation with (Poly)Logarithmic Overhead"): the clients are on a ring in an order that nobody could choose, each
joined to the k/2 next ones on either side. That is the Harary graph H(k, n) for an even k: k-regular, and connected
unless k clients or more are removed (Harary 1962). `parameters.py` chooses k.

The ring of a seed, the same in every language: client `index` has the rank

    SHA-256("umbel-secagg/1 ring" || seed || u32(index)),        u32: four bytes, little-endian,

and the clients are in ascending order of their ranks, compared as 32 bytes. The order of independent ranks is uniform.
"""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

SEED_BYTES = 32
_LABEL = b"umbel-secagg/1 ring"


@dataclass(frozen=True, slots=True)
class Graph:
    """An undirected graph over n clients, with the indices 0 to n - 1. Raises `ValueError` for impossible numbers."""

    n: int
    k: int  # neighbours of each: an even number, or n - 1 for the complete graph
    ring: tuple[int, ...] = field(repr=False)  # the indices in their order, which a complete graph does not use
    _places: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.n < 2:
            raise ValueError(f"a graph needs two clients or more, not {self.n}")
        if self.k != self.n - 1 and (self.k % 2 or not 2 <= self.k < self.n - 1):
            raise ValueError(
                f"each of {self.n} clients must have {self.n - 1} neighbours, or a smaller even number of neighbours, "
                f"not {self.k}"
            )
        if len(self.ring) != self.n or set(self.ring) != set(range(self.n)):
            raise ValueError(f"the ring must list each index below {self.n} exactly once")
        places = [0] * self.n
        for place, index in enumerate(self.ring):
            places[index] = place
        object.__setattr__(self, "_places", tuple(places))

    @property
    def complete(self) -> bool:
        return self.k == self.n - 1

    def neighbours(self, index: int) -> tuple[int, ...]:
        """The k neighbours of a client, ascending. Raises `IndexError`."""
        return tuple(other for other in self.holders(index) if other != index)

    def holders(self, index: int) -> tuple[int, ...]:
        """The k + 1 holders of a client's secrets: its neighbours and itself, ascending. Raises `IndexError`."""
        if not 0 <= index < self.n:
            raise IndexError(f"there is no client {index}: the {self.n} clients are numbered from 0")
        return tuple(range(self.n)) if self.complete else tuple(sorted(self._around(self._places[index])))

    def _around(self, place: int) -> Iterable[int]:
        reach = self.k // 2
        return (self.ring[(place + step) % self.n] for step in range(-reach, reach + 1))


def graph_of(n: int, k: int, seed: bytes) -> Graph:
    """The graph of n clients with k neighbours each: complete for k = n - 1, else the ring of `seed`.

    `seed`: 32 bytes that neither the coordinator nor a client could choose. Raises `ValueError`.
    """
    if len(seed) != SEED_BYTES:
        raise ValueError(f"the seed of a graph must have {SEED_BYTES} bytes, not {len(seed)}")
    return Graph(n, k, tuple(range(n)) if k == n - 1 else ring_of(n, seed))


def ring_of(n: int, seed: bytes) -> tuple[int, ...]:
    """The indices below n in the order of their ranks."""

    def rank(index: int) -> bytes:
        return hashlib.sha256(_LABEL + seed + struct.pack("<I", index)).digest()

    return tuple(sorted(range(n), key=rank))
