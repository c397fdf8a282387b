"""How one data set is split over many clients: label skew by a Dirichlet distribution, or by shards of one label.

*Dirichlet.* Hsu, Qi and Brown 2019, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification" (arXiv:1909.06335), section 3: with p the share of each class in the whole data set, client k draws its
own shares

    q_k ~ Dir(alpha * p)

and fills its shard with classes drawn from q_k, without replacement; once a class is used up, q_k is renormalised over
the others. alpha -> infinity gives every client the whole's mixture, alpha -> 0 a single class each. The paper's shards
are equally large; here they may differ: beyond the least size, shares of the data are drawn from Dir(size_alpha).

*Shards.* McMahan, Moore, Ramage, Hampson and Aguera y Arcas 2017, "Communication-Efficient Learning of Deep Networks
from Decentralized Data" (arXiv:1602.05629), section 3, the "pathological" split: samples sorted by label are cut into
shards of equal size, and each client gets a few of them, so that most clients have only that many classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Labels = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DirichletSplit:
    """`alpha`: label skew, smaller is more skewed. `size_alpha`: the same for sizes, None for equal sizes.

    `min_samples`: every client gets at least so many.
    """

    n_clients: int
    alpha: float
    size_alpha: float | None = None
    min_samples: int = 1

    def __post_init__(self) -> None:
        if self.n_clients < 1:
            raise ValueError(f"n_clients must be at least 1, not {self.n_clients}")
        if self.min_samples < 0:
            raise ValueError(f"min_samples must not be negative, it is {self.min_samples}")
        for name in ("alpha", "size_alpha"):
            if (value := getattr(self, name)) is not None and not 0 < value < np.inf:
                raise ValueError(f"{name} must be positive and finite, not {value}")


def dirichlet_partition(labels: Labels, split: DirichletSplit, seed: int) -> list[Indices]:
    """Indices into `labels`, one sorted array per client, the largest shard first; every index in exactly one.

    `labels`: any integers, one per sample. The same seed gives the same split. Raises `ValueError` if there are too few
    samples for `min_samples` each.
    """
    rng = np.random.default_rng(seed)
    sizes = _sizes(len(labels), split, rng)
    classes, members = np.unique(labels, return_inverse=True)
    pools = [rng.permutation(np.flatnonzero(members == c)) for c in range(len(classes))]
    prior = np.array([len(pool) for pool in pools], dtype=np.float64) / max(len(labels), 1)
    shards: list[Indices] = [np.empty(0, dtype=np.int64)] * split.n_clients
    for client in rng.permutation(split.n_clients):  # whoever comes last gets what is left, so the order is drawn too
        counts = _class_counts(int(sizes[client]), prior, split.alpha, pools, rng)
        taken = [pool[:count] for pool, count in zip(pools, counts, strict=True)]
        pools = [pool[count:] for pool, count in zip(pools, counts, strict=True)]
        shards[client] = np.sort(np.concatenate([np.empty(0, dtype=np.int64), *taken]))
    return shards


def shard_partition(labels: Labels, n_clients: int, shards_each: int, seed: int) -> list[Indices]:
    """Indices into `labels`, one sorted array per client; every index in exactly one. `shards_each`: of one client.

    Shards differ by one sample at most; which client gets which is drawn. The same seed gives the same split. Raises
    `ValueError` if there is not a sample for each shard.
    """
    n_shards = n_clients * shards_each
    if n_clients < 1 or shards_each < 1 or n_shards > len(labels):
        raise ValueError(
            f"{len(labels)} samples cannot be cut into {shards_each} shards for each of {n_clients} clients"
        )
    shards = np.array_split(np.argsort(labels, kind="stable"), n_shards)
    dealt = np.random.default_rng(seed).permutation(n_shards).reshape(n_clients, shards_each)
    return [np.sort(np.concatenate([shards[number] for number in hand])) for hand in dealt]


def class_counts(labels: Labels, shards: Sequence[Indices]) -> Indices:
    """How many samples of each class each client holds: shape (clients, classes), classes in ascending order."""
    classes = np.unique(labels)
    return np.array([[np.count_nonzero(labels[shard] == c) for c in classes] for shard in shards], dtype=np.int64)


def _sizes(n_samples: int, split: DirichletSplit, rng: np.random.Generator) -> Indices:
    """Sizes of the shards, descending; they sum to `n_samples`."""
    n_free = n_samples - split.n_clients * split.min_samples
    if n_free < 0:
        raise ValueError(
            f"{n_samples} samples are too few for {split.n_clients} clients with at least {split.min_samples} each"
        )
    if split.size_alpha is None:
        extra = np.arange(split.n_clients) < n_free % split.n_clients
        free = n_free // split.n_clients + extra.astype(np.int64)
    else:
        free = rng.multinomial(n_free, _dirichlet(np.full(split.n_clients, split.size_alpha), rng))
    return np.sort(free + split.min_samples)[::-1].astype(np.int64)


def _class_counts(
    size: int, prior: npt.NDArray[np.float64], alpha: float, pools: Sequence[Indices], rng: np.random.Generator
) -> Indices:
    """How many of each class a client of `size` samples takes from what `pools` still hold."""
    left = np.array([len(pool) for pool in pools], dtype=np.int64)
    counts = np.zeros_like(left)
    if size == 0:
        return counts
    shares = _dirichlet(alpha * prior, rng)
    while (missing := size - int(counts.sum())) > 0:
        shares = np.where(counts < left, shares, 0.0)
        if shares.sum() <= 0:  # the classes it prefers are used up: take from the rest as they are
            shares = (left - counts).astype(np.float64)
        drawn = rng.multinomial(missing, shares / shares.sum())
        counts = np.minimum(counts + drawn, left)
    return counts


def _dirichlet(concentration: npt.NDArray[np.float64], rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """A draw that survives tiny concentrations, where every gamma variate may underflow to zero."""
    draw = rng.dirichlet(concentration)
    if np.isfinite(draw).all() and draw.sum() > 0:
        return draw
    one_hot = np.zeros(len(concentration))
    one_hot[rng.integers(len(concentration))] = 1.0
    return one_hot
