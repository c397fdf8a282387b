"""Synthetic(alpha, beta): any number of generated clients whose data and models differ by a chosen amount.

Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith 2020, "Federated Optimization in Heterogeneous Networks"
(arXiv:1812.06127), section 5.1 and appendix C.1. Client k has samples x of 60 numbers and their classes y, of 10:

    x ~ N(v_k, Sigma)      Sigma diagonal, Sigma_jj = j^-1.2
    v_k,j ~ N(B_k, 1)      B_k ~ N(0, beta)
    y = argmax(W_k^T x + b_k)
    W_k,ij, b_k,i ~ N(u_k, 1)     u_k ~ N(0, alpha)

and 50 + floor(LogNormal(4, 2)) of them, of which the last tenth is held back. In the IID variant v_k = 0, and all
clients share one W and b. Where the paper and the authors' code differ, the code is followed: alpha and beta are
standard deviations, not variances (the same for 0 and 1), and a tenth is held back, not a fifth.

u_k adds u_k (1 + sum of x) to all ten logits, so it cannot change which is the largest. Hence alpha changes no sample
and no class: Synthetic(0, 1) is Synthetic(1, 1). alpha is checked, and no u_k is drawn.

Each client's numbers are drawn by a counter from the seed and its number (`aggregation.sample_order`), so a million
clients cost nothing, and a client's data do not depend on the rest of its cohort. A normal number is one of 65,536
equally likely quantiles, at (i + 1/2) / 65536, chosen by 16 bits of the stream: four to a word, in a fourth of the
time. Their deviation is 0.99999, and the largest is 4.3.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from umbel.aggregation.sample_order import Words, sample_keys
from umbel.aggregation.seeds import derive_seed
from umbel.sim.data.data_set import LearningTask, SampleSet
from umbel.sim.data.partition.partition import Indices
from umbel.sim.data.population import CohortData, starts_of

Floats: TypeAlias = npt.NDArray[np.float32]

N_INPUTS, N_CLASSES = 60, 10
CLIENTS_MAX = 10_000_000
TEST_CLIENTS_MAX = 1000
_SIZE_LEAST, _SIZE_MEAN, _SIZE_DEVIATION = 50, 4.0, 2.0
_TRAIN_TENTHS = 9
_PER_WORD = 4
_MODEL_VALUES = N_INPUTS * N_CLASSES + N_CLASSES
_MODEL_WORDS = -(-_MODEL_VALUES // _PER_WORD)
_SAMPLE_WORDS = N_INPUTS // _PER_WORD
_BLOCK_WORDS = 1 << 14  # fit the cache together with the numbers made of them


@dataclass(frozen=True, slots=True)
class SyntheticLaw:
    """`samples`: of each client for training; None for the paper's law of sizes."""

    n_clients: int = 30
    alpha: float = 1.0
    beta: float = 1.0
    is_iid: bool = False
    samples: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.n_clients <= CLIENTS_MAX:
            raise ValueError(f"clients must lie between 1 and {CLIENTS_MAX}, not {self.n_clients}")
        for name in ("alpha", "beta"):
            if not 0 <= (value := getattr(self, name)) <= 1e3:
                raise ValueError(f"{name} must lie between 0 and 1000, not {value}")
        if self.samples is not None and not 1 <= self.samples <= 1 << 24:
            raise ValueError(f"samples must lie between 1 and 2^24, not {self.samples}")


class SyntheticPopulation:
    """A `Population` of Synthetic(alpha, beta). `test`: the held-back data of at most a thousand clients."""

    name = "synthetic"
    task = LearningTask.CLASSIFICATION
    n_classes = N_CLASSES
    input_shape = (N_INPUTS,)

    def __init__(self, law: SyntheticLaw, seed: int) -> None:
        self._law = law
        self._seeds = {
            what: np.uint64(derive_seed(seed, "synthetic", what)) for what in ("size", "mean", "shift", "model", "x")
        }

    @property
    def n_clients(self) -> int:
        return self._law.n_clients

    @cached_property
    def test(self) -> SampleSet:
        n = min(self.n_clients, TEST_CLIENTS_MAX)
        return self.holdout_of(np.arange(n, dtype=np.int64) * self.n_clients // n).samples

    def sizes(self, clients: Indices) -> Indices:
        if self._law.samples is not None:
            return np.full(len(clients), self._law.samples, dtype=np.int64)
        return self._drawn_sizes(clients) * _TRAIN_TENTHS // 10

    def data_of(self, clients: Indices) -> CohortData:
        return self._drawn(clients, np.zeros(len(clients), dtype=np.int64), self.sizes(clients))

    def holdout_of(self, clients: Indices) -> CohortData:
        trained = self.sizes(clients)
        if self._law.samples is not None:
            held = np.maximum(trained // _TRAIN_TENTHS, 1)
        else:
            held = self._drawn_sizes(clients) - trained
        return self._drawn(clients, trained, held)

    def _drawn_sizes(self, clients: Indices) -> Indices:
        """All samples of each, held back or not."""
        logarithms = _SIZE_MEAN + _SIZE_DEVIATION * self._normal(clients, "size")
        return _SIZE_LEAST + np.exp(logarithms).astype(np.int64)

    def _drawn(self, clients: Indices, firsts: Indices, counts: Indices) -> CohortData:
        """`counts` samples of each client, from its first on."""
        starts = starts_of(counts)
        numbers = np.arange(starts[-1]) + np.repeat(firsts - starts[:-1], counts)
        keys = np.repeat(self._keys(clients, "x"), counts)
        inputs = _normals(keys, numbers * _SAMPLE_WORDS, _SAMPLE_WORDS)
        inputs *= np.arange(1, N_INPUTS + 1, dtype=np.float32) ** np.float32(-0.6)
        if not self._law.is_iid:
            _shift(inputs, self._centres(clients), starts)
        classes = _classes(inputs, self._models(clients), starts)
        return CohortData(SampleSet(torch.from_numpy(inputs), classes), np.arange(starts[-1]), starts)

    def _centres(self, clients: Indices) -> Floats:
        """v of each: (clients, 60)."""
        centres = _normals(self._keys(clients, "mean"), np.zeros(len(clients), dtype=np.int64), _SAMPLE_WORDS)
        centres += (self._law.beta * self._normal(clients, "shift")).astype(np.float32)[:, None]
        return centres

    def _models(self, clients: Indices) -> Floats:
        """W of each, with b as its last row: (clients, 61, 10), or (1, 61, 10) for a common one."""
        owners = np.zeros(1, dtype=np.int64) if self._law.is_iid else clients
        values = _normals(self._keys(owners, "model"), np.zeros(len(owners), dtype=np.int64), _MODEL_WORDS)
        return values[:, :_MODEL_VALUES].reshape(-1, N_INPUTS + 1, N_CLASSES)

    def _normal(self, clients: Indices, what: str) -> npt.NDArray[np.float64]:
        """A normal number of each client, from 53 bits: such quantiles reach 8 deviations."""
        uniform = ((self._keys(clients, what) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return np.asarray(torch.special.ndtri(torch.from_numpy(uniform)).numpy())

    def _keys(self, clients: Indices, what: str) -> Words:
        """The start of each client's stream for one purpose."""
        return sample_keys(np.full(len(clients), self._seeds[what]), clients.astype(np.uint64))


@cache
def _quantiles() -> Tensor:
    """The normal numbers that are drawn, by 16 bits: float32 (65536,)."""
    middles = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    quantiles: Tensor = torch.special.ndtri(middles).float()
    return quantiles


def _normals(keys: Words, firsts: Indices, n_words: int) -> Floats:
    """(rows, 4 n_words): of the stream of each row's key, the numbers of `n_words` words from its first on."""
    drawn = np.empty((len(keys), n_words * _PER_WORD), dtype=np.float32)
    flat, quantiles = torch.from_numpy(drawn.reshape(-1)), _quantiles()
    step = max(1, _BLOCK_WORDS // n_words)
    offsets = np.arange(n_words, dtype=np.uint64)
    for start in range(0, len(keys), step):
        rows = slice(start, start + step)
        words = sample_keys(keys[rows, None], firsts[rows, None].astype(np.uint64) + offsets)
        indices = torch.from_numpy(words.view(np.uint16).astype(np.int32).reshape(-1))
        first = start * n_words * _PER_WORD
        torch.index_select(quantiles, 0, indices, out=flat[first : first + len(indices)])
    return drawn


def _shift(inputs: Floats, centres: Floats, starts: Indices) -> None:
    """Add each client's centre to its inputs."""
    if (n := _equal(starts)) is not None:
        inputs.reshape(len(centres), n, N_INPUTS)[:] += centres[:, None]
        return
    for first, end, centre in zip(starts[:-1], starts[1:], centres, strict=True):
        inputs[first:end] += centre


def _classes(inputs: Floats, models: Floats, starts: Indices) -> Tensor:
    """int64 (n,). Each client's logits are a product of their own, so rounding does not depend on others."""
    logits = np.empty((len(inputs), N_CLASSES), dtype=np.float32)
    weights, biases = models[:, :-1], models[:, -1:]
    if (n := _equal(starts)) is not None:
        cut = logits.reshape(len(starts) - 1, n, N_CLASSES)
        np.matmul(inputs.reshape(len(starts) - 1, n, N_INPUTS), weights, out=cut)
        cut += biases
    else:
        of_client = np.broadcast_to(weights, (len(starts) - 1, N_INPUTS, N_CLASSES))
        of_bias = np.broadcast_to(biases, (len(starts) - 1, 1, N_CLASSES))
        for first, end, weight, bias in zip(starts[:-1], starts[1:], of_client, of_bias, strict=True):
            np.matmul(inputs[first:end], weight, out=logits[first:end])
            logits[first:end] += bias
    return torch.from_numpy(logits).argmax(1)


def _equal(starts: Indices) -> int | None:
    """How many samples each client has, if all have the same number."""
    sizes = np.diff(starts)
    return int(sizes[0]) if len(sizes) and (sizes == sizes[0]).all() else None
