"""Label skew: by a Dirichlet distribution, by shards of one label, or by a number of labels for each client.

*Dirichlet by client.* Hsu, Qi and Brown 2019, "Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification" (arXiv:1909.06335), section 3: with p the share of each class in the whole data set, client k
draws its own shares

    q_k ~ Dir(alpha * p)

and fills its shard with classes drawn from q_k, without replacement; once a class is used up, q_k is renormalised over
the others. alpha -> infinity gives every client the whole's mixture, alpha -> 0 a single class each. The paper's shards
are equally large; here they may differ (`partition.py`).

*Dirichlet by class.* Yurochkin et al. 2019, "Bayesian Nonparametric Federated Learning of Neural Networks"
(arXiv:1905.12022), and Li, Diao, Chen and He 2021, "Federated Learning on Non-IID Data Silos: An Experimental Study"
(arXiv:2102.02079): of each class c, the clients get the shares

    s_c ~ Dir_N(alpha)

so that sizes differ as well. Both papers' programs give no more to a client that has the mean number of samples
(`is_balanced`), and draw again until all have the least number, which never happens with many clients; here, missing
samples are taken from the largest clients.

*Shards.* McMahan, Moore, Ramage, Hampson and Aguera y Arcas 2017, "Communication-Efficient Learning of Deep Networks
from Decentralized Data" (arXiv:1602.05629), section 3, the "pathological" split: samples sorted by label are cut into
shards of equal size, and each client gets a few of them, so that most clients have only that many classes.

*Classes.* Li et al. 2021, "#C = k": every client has samples of exactly k labels, and the samples of a label are
divided equally among the clients with that label. As in their program, the first labels go round, so that every label
has a client if there are as many clients as labels; the others are drawn.
"""

from dataclasses import dataclass

import numpy as np

from umbel.sim.data.partition.partition import (
    Floats,
    Indices,
    Labels,
    SizesSection,
    dirichlet,
    drawn_of_each,
    drawn_sizes,
    require_enough,
    shards_of,
)


@dataclass(frozen=True, slots=True)
class DirichletSplit:
    """A Dirichlet split by client."""

    n_clients: int
    alpha: float  # label skew; smaller is more skewed
    size_alpha: float | None = None  # the same for sizes; None for equal sizes
    min_samples: int = 1  # of each client at least

    def __post_init__(self) -> None:
        if self.n_clients < 1:
            raise ValueError(f"n_clients must be at least 1, not {self.n_clients}")
        if self.min_samples < 0:
            raise ValueError(f"min_samples must not be negative, it is {self.min_samples}")
        for name in ("alpha", "size_alpha"):
            if (value := getattr(self, name)) is not None and not 0 < value < np.inf:
                raise ValueError(f"{name} must be positive and finite, not {value}")


def dirichlet_partition(labels: Labels, split: DirichletSplit, seed: int) -> tuple[Indices, ...]:
    """Dirichlet by client, the largest shard first; every index in exactly one.

    `labels`: any integers, one per sample. The same seed gives the same split. Raises `ValueError` if there are too few
    samples for `min_samples` each.
    """
    rng = np.random.default_rng(seed)
    law = SizesSection() if split.size_alpha is None else SizesSection("dirichlet", alpha=split.size_alpha)
    sizes = drawn_sizes(len(labels), split.n_clients, split.min_samples, law, rng)
    return dirichlet_by_client(labels, np.sort(sizes)[::-1], split.alpha, rng)


def dirichlet_by_client(labels: Labels, sizes: Indices, alpha: float, rng: np.random.Generator) -> tuple[Indices, ...]:
    """Each client's indices into `labels`, ascending. `sizes`: how many; they sum to the number of labels."""
    pools = _pools(labels, rng)
    left = np.array([len(pool) for pool in pools], dtype=np.int64)
    prior = left / max(len(labels), 1)
    counts = np.zeros((len(sizes), len(pools)), dtype=np.int64)
    turns = rng.permutation(len(sizes))  # the last client gets the rest, so the order is drawn too
    for client in turns:
        counts[client] = _class_counts(int(sizes[client]), prior, alpha, left, rng)
        left -= counts[client]
    owners = np.empty(len(labels), dtype=np.int64)
    for number, pool in enumerate(pools):
        owners[pool] = np.repeat(turns, counts[turns, number])
    return shards_of(owners, len(sizes))


def dirichlet_by_class(
    labels: Labels, n_clients: int, alpha: float, least: int, is_balanced: bool, rng: np.random.Generator
) -> tuple[Indices, ...]:
    """Each client's indices into `labels`, ascending, at least `least`; every index in exactly one.

    Raises `ValueError` if there are too few samples for that.
    """
    require_enough(len(labels), n_clients, least)
    owners, held = np.empty(len(labels), dtype=np.int64), np.zeros(n_clients, dtype=np.int64)
    for pool in _pools(labels, rng):
        shares = dirichlet(np.full(n_clients, alpha), rng)
        if is_balanced:
            has_room = held * n_clients < len(labels)
            shares = shares * has_room if (shares * has_room).sum() > 0 else has_room.astype(np.float64)
        ends = np.floor(np.cumsum(shares) / shares.sum() * len(pool)).astype(np.int64)
        ends[-1] = len(pool)
        counts = np.diff(ends, prepend=0)
        owners[pool] = np.repeat(np.arange(n_clients), counts)
        held += counts
    _give_the_least(owners, held, least, rng)
    return shards_of(owners, n_clients)


def shard_partition(labels: Labels, n_clients: int, shards_each: int, seed: int) -> tuple[Indices, ...]:
    """Each client's indices into `labels`, ascending; every index in exactly one. `shards_each`: of one client.

    Shards differ by one sample at most; which client gets which is drawn. The same seed gives the same split. Raises
    `ValueError` if there is not a sample for each shard.
    """
    n_shards = n_clients * shards_each
    if n_clients < 1 or shards_each < 1 or n_shards > len(labels):
        raise ValueError(
            f"{len(labels)} samples cannot be cut into {shards_each} shards for each of {n_clients} clients; use fewer "
            "clients, or a smaller shards_each"
        )
    size, n_longer = divmod(len(labels), n_shards)
    client_of = np.empty(n_shards, dtype=np.int64)
    client_of[np.random.default_rng(seed).permutation(n_shards)] = np.repeat(np.arange(n_clients), shards_each)
    owners = np.empty(len(labels), dtype=np.int64)
    owners[np.argsort(labels, kind="stable")] = np.repeat(client_of, size + (np.arange(n_shards) < n_longer))
    return shards_of(owners, n_clients)


def classes_partition(
    labels: Labels, n_clients: int, classes_each: int, rng: np.random.Generator
) -> tuple[Indices, ...]:
    """Each client's indices into `labels`, ascending, of exactly `classes_each` labels.

    Every index is in one shard; with fewer clients than labels, those of labels that no client has are in none. Raises
    `ValueError` where there are fewer labels, or fewer samples of a label than clients that are to have some.
    """
    pools = _pools(labels, rng)
    if not 1 <= classes_each <= len(pools):
        raise ValueError(
            f"classes_each must lie between 1 and {len(pools)}, the number of labels in the data, not {classes_each}"
        )
    keys = rng.random((n_clients, len(pools)), dtype=np.float32)
    keys[np.arange(n_clients), rng.permutation(n_clients) % len(pools)] = -1
    has = np.zeros(keys.shape, dtype=np.bool_)
    np.put_along_axis(has, np.argpartition(keys, classes_each - 1, axis=1)[:, :classes_each], True, axis=1)
    owners = np.full(len(labels), -1, dtype=np.int64)
    for pool, is_owner in zip(pools, has.T, strict=True):
        clients = rng.permutation(np.flatnonzero(is_owner))
        if len(clients) > len(pool):
            raise ValueError(
                f"label {labels[pool[0]]} has {len(pool)} samples, too few for the {len(clients)} clients that need "
                "at least one each; use fewer clients, or a smaller classes_each"
            )
        if len(clients):
            owners[pool] = clients[np.arange(len(pool)) % len(clients)]
    return shards_of(owners, n_clients)


def _pools(labels: Labels, rng: np.random.Generator) -> list[Indices]:
    """The indices of each class, in the order of classes, shuffled."""
    ends = np.cumsum(np.unique(labels, return_counts=True)[1])[:-1]
    return [rng.permutation(pool) for pool in np.split(np.argsort(labels, kind="stable"), ends)]


def _class_counts(size: int, prior: Floats, alpha: float, left: Indices, rng: np.random.Generator) -> Indices:
    """How many samples of each class a client of `size` samples takes, with `left` of each class remaining."""
    counts, missing = np.zeros_like(left), size
    shares = dirichlet(alpha * prior, rng) if missing else prior
    while missing:
        has_more = counts < left
        shares = shares * has_more
        if (total := shares.sum()) <= 0:  # the other shares underflow; renormalised, they have this distribution
            shares[has_more] = dirichlet(alpha * prior[has_more], rng)
            total = shares.sum()
        counts = np.minimum(counts + rng.multinomial(missing, shares / total), left)
        missing = size - int(counts.sum())
    return counts


def _give_the_least(owners: Indices, sizes: Indices, least: int, rng: np.random.Generator) -> None:
    """Move drawn samples, in place, from the largest clients to those with fewer than `least`."""
    needed = np.maximum(least - sizes, 0)
    n_moved = int(needed.sum())
    if n_moved == 0:
        return
    given = np.maximum(sizes - _cut(sizes, n_moved), 0)
    givers = np.flatnonzero(given)
    given[givers[: int(given.sum()) - n_moved]] -= 1
    moved = np.flatnonzero(drawn_of_each(owners, given, rng))
    owners[rng.permutation(moved)] = np.repeat(np.arange(len(sizes)), needed)


def _cut(sizes: Indices, n_wanted: int) -> int:
    """The greatest size above which lie `n_wanted` samples or more, of all clients together."""
    low, high = 0, int(sizes.max())
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if np.maximum(sizes - middle, 0).sum() >= n_wanted else (low, middle)
    return low
