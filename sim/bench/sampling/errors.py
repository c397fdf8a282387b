"""How far the mean change of a round's clients is from the mean change of all clients.

N clients; client i has n_i of all n samples, p_i = n_i / n, and the change x_i of one global model. All clients
together would change it by X = sum_i p_i x_i. A round changes it by A = sum_i c_i x_i, where the weights c_i depend on
who was drawn and who reported (`aggregation/round/weighting.py`). Over all rounds that could have been:

    bias        |E[A] - X|
    deviation   sqrt(E |A - E[A]|^2)
    error       sqrt(E |A - X|^2), so error^2 = bias^2 + deviation^2

Each is divided by |X|. The c_i sum to 1 except in scheme II of Li et al. 2020, so errors need only the inner products
of the x_i, not the x_i themselves.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.aggregation.plans.round import Weighting
from umbel.aggregation.round.weighting import Candidate, draw, weight_of
from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.types import client_name, client_number
from umbel.sim.data.partition.partition import Indices

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ClientChanges:
    """The changes of all clients at one model. `products`: (N, N), x_i . x_j; `sizes`: int64 (N,), samples."""

    sizes: Indices
    products: Floats

    @classmethod
    def of(cls, sizes: Indices, changes: Tensor) -> "ClientChanges":
        """`changes`: (N, values)."""
        wide = changes.to(torch.float64)
        return cls(sizes, (wide @ wide.T).numpy())

    @property
    def shares(self) -> Floats:
        """Each client's share of the samples, p: (N,)."""
        shares: Floats = self.sizes / self.sizes.sum()
        return shares

    @property
    def length(self) -> float:
        """|X|."""
        return math.sqrt(self.shares @ self.products @ self.shares)


@dataclass(frozen=True, slots=True)
class MeanErrors:
    """Errors of a round's mean change, divided by |X|."""

    bias: float
    deviation: float

    @property
    def error(self) -> float:
        return math.hypot(self.bias, self.deviation)


def errors_of(weights: Floats, changes: ClientChanges) -> MeanErrors:
    """The errors over these rounds. `weights`: (rounds, N), of each client in each round's mean.

    The squared bias is corrected for the finite number of rounds, and is 0 where the correction is greater.
    """
    off = weights - changes.shares
    mean = off.mean(0)
    squared_error = float(np.einsum("ri,ij,rj->r", off, changes.products, off, optimize=True).mean())
    squared_mean = float(mean @ changes.products @ mean)
    variance = (squared_error - squared_mean) * len(off) / (len(off) - 1)
    squared_bias = max(0.0, squared_mean - variance / len(off))
    return MeanErrors(math.sqrt(squared_bias) / changes.length, math.sqrt(max(0.0, variance)) / changes.length)


def proportional_error(changes: ClientChanges, n_draws: int) -> float:
    """The exact error of independent draws with chances p and a plain mean, divided by |X|.

    E |A - X|^2 = sum_i p_i |x_i - X|^2 / K for K draws, which have no bias (Li et al. 2020, lemmas 4 and 5, scheme I).
    """
    share = changes.shares
    squared = float(share @ np.diag(changes.products)) - changes.length**2
    return math.sqrt(max(0.0, squared) / n_draws) / changes.length


def samples_in_round(weighting: Weighting, sizes: Indices, n_draws: int) -> float:
    """The expected samples of the clients in a cohort. A client that is drawn more than once trains once."""
    if weighting is Weighting.SAMPLES:
        return n_draws * float(sizes.mean())
    return float(sizes @ (1 - (1 - sizes / sizes.sum()) ** n_draws))


def drawn_weights(weighting: Weighting, sizes: Indices, n_draws: int, n_rounds: int, seed: int) -> Floats:
    """The weights of clients in the means of rounds in which all drawn clients report: (rounds, N)."""
    candidates = [Candidate(client_name(i), size) for i, size in enumerate(sizes.tolist())]
    weights = np.zeros((n_rounds, len(sizes)))
    for number in range(n_rounds):
        for client, n_of in draw(weighting, candidates, n_draws, derive_seed(seed, "draw", number)).items():
            position = client_number(client)
            weights[number, position] = weight_of(weighting, n_of, int(sizes[position]))
    return normalised(weights)


def scheme_two(weights: Floats, sizes: Indices) -> Floats:
    """The weights of scheme II of Li et al. 2020 for the same clients: N / K p_i for each of the K drawn uniformly.

    Their mean has no bias, but they need not sum to 1 in a round (Horvitz and Thompson 1952).
    """
    drawn = weights > 0
    scaled: Floats = drawn * (sizes / sizes.sum()) * (len(sizes) / drawn.sum(1, keepdims=True))
    return scaled


def normalised(weights: Floats) -> Floats:
    """The same weights, divided by their sum in each round."""
    shares: Floats = weights / weights.sum(1, keepdims=True)
    return shares
