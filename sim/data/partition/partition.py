"""How one data set is dealt out: which client holds which samples, how many, and how many of each class.

`labels.py` deals by label, this module by size, as the `[partition]` section (`section.py`) says. Every client gets the
least that is asked for. The remaining samples are divided

    equal         in equal parts
    log-normal    as exp(sigma * z_k), z_k ~ N(0, 1)
    power-law     as x_k, P(x_k > x) = x^-exponent for x >= 1: the smaller the exponent, the heavier the tail
    dirichlet     by a multinomial draw with shares ~ Dir(alpha): Li, Diao, Chen and He 2021, "Federated Learning on
                  Non-IID Data Silos: An Experimental Study" (arXiv:2102.02079), quantity skew
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from umbel.aggregation.phrases import counted, some
from umbel.aggregation.types import require_within

Labels = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64]


class Transform(Protocol):
    """Makes clients' inputs differ, such as by a sensor's noise or the angle of a camera."""

    def __call__(self, inputs: Tensor, clients: Indices, starts: Indices, *, are_held_back: bool) -> Tensor:
        """The changed inputs of these clients; `inputs` may be overwritten.

        The i-th of `clients` (numbers) holds `inputs[starts[i]:starts[i + 1]]`, in its training data or in its
        held-back data. A client's result is always the same. Raises `ValueError` for inputs that cannot be changed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Partition:
    """The indices of each client's samples."""

    shards: tuple[Indices, ...]  # to train on, ascending, disjoint
    holdouts: tuple[Indices, ...] | None = None  # to measure models on, in no shard; None: no client holds any back
    names: tuple[str, ...] | None = None  # of clients that have some (hospitals, roles)

    @property
    def n_clients(self) -> int:
        return len(self.shards)

    @property
    def sizes(self) -> Indices:
        """How many samples each client trains on."""
        return np.array([len(shard) for shard in self.shards], dtype=np.int64)


def require_option(choice: str, of: str, chosen: str, name: str, value: object) -> None:
    """Raise `ValueError` unless an option that belongs to `choice = "<of>"` is set if, and only if, that is chosen."""
    if of == chosen and value is None:
        raise ValueError(f'{choice} = "{of}" needs {name}; set it beside the {choice}')
    if of != chosen and value is not None:
        raise ValueError(f'{name} is for {choice} = "{of}", not for {choice} = "{chosen}"; leave it out')


def shards_of(owners: Indices, n_clients: int) -> tuple[Indices, ...]:
    """The indices that each client holds, ascending. `owners`: each sample's client, or -1."""
    order = np.argsort(owners, kind="stable").astype(np.int64)
    ends = np.cumsum(np.bincount(owners + 1, minlength=n_clients + 1))
    return tuple(np.split(order, ends)[1:-1])


def with_holdouts(partition: Partition, share: float, seed: int) -> Partition:
    """Hold back a drawn, rounded share of each client's samples; at least one stays for training.

    Raises `ValueError` if the share is not in [0, 1), or if there are holdouts already.
    """
    if not 0 <= share < 1:
        raise ValueError(f"holdout, the share that each client holds back, must lie in [0, 1), not {share}")
    if share == 0:
        return partition
    if partition.holdouts is not None:
        raise ValueError("these clients hold samples back already; leave `holdout` out")
    sizes = partition.sizes
    n_held = np.clip(np.rint(share * sizes).astype(np.int64), 0, np.maximum(sizes - 1, 0))
    owners = np.repeat(np.arange(partition.n_clients), sizes)
    is_held = drawn_of_each(owners, n_held, np.random.default_rng(seed))
    rows, ends = np.concatenate(partition.shards), np.cumsum(n_held)[:-1]
    shards = np.split(rows[~is_held], np.cumsum(sizes - n_held)[:-1])
    return replace(partition, shards=tuple(shards), holdouts=tuple(np.split(rows[is_held], ends)))


def drawn_of_each(owners: Indices, wanted: Indices, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """A mask of the samples: `wanted` of each owner, drawn evenly. Owners are numbered from 0."""
    order = np.lexsort((rng.random(len(owners)), owners))
    sizes = np.bincount(owners, minlength=len(wanted))
    rank = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    mask = np.zeros(len(owners), dtype=np.bool_)
    mask[order] = rank < wanted[owners[order]]
    return mask


def class_counts(labels: Labels, shards: Sequence[Indices], classes: Labels | None = None) -> Indices:
    """How many samples of each class each client holds: shape (clients, classes).

    `classes`: which to count, ascending; by default all that are in `labels`.
    """
    classes = np.unique(labels) if classes is None else classes
    owners = np.repeat(np.arange(len(shards)), [len(shard) for shard in shards])
    held = np.searchsorted(classes, labels[np.concatenate([np.empty(0, dtype=np.int64), *shards])])
    counts = np.bincount(owners * len(classes) + held, minlength=len(shards) * len(classes))
    return counts.reshape(len(shards), len(classes)).astype(np.int64)


def natural_partition(
    groups: npt.NDArray[Any],
    least: int,
    n_clients: int | None,
    rng: np.random.Generator,
    names: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
) -> Partition:
    """One client per group, in ascending order of the groups. `groups`: of each sample, numbers or words.

    Groups with fewer than `least` samples are left out. `n_clients`: that many of the others, drawn evenly; None for
    all. `names`: of groups that are numbers, by number; by default they are called by their number. `only`: the names
    of those that take part; None for all. Raises `ValueError` if there are too few groups, or none of a name.
    """
    found, members, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    called: list[str] = [str(group) if names is None else str(names[group]) for group in found]
    if only is not None and (unknown := sorted(set(only) - set(called))):
        raise ValueError(f"there is no group {', '.join(unknown)}; the groups are {some(called)}")
    kept = np.flatnonzero((sizes >= least) & np.array([only is None or name in only for name in called]))
    wanted = 1 if n_clients is None else n_clients
    if len(kept) < wanted:
        named = "" if only is None else " and its name in `only`"
        raise ValueError(
            f"{counted(len(found), 'group')} ({some(called)}) can give {counted(len(kept), 'client')}, not {wanted}: a "
            f"group needs at least {counted(least, 'sample')}{named}; use fewer clients, or a smaller min_samples"
        )
    if n_clients is not None:
        kept = np.sort(rng.choice(kept, n_clients, replace=False))
    client_of = np.full(len(found), -1, dtype=np.int64)
    client_of[kept] = np.arange(len(kept))
    return Partition(shards_of(client_of[members], len(kept)), names=tuple(called[group] for group in kept))


Floats: TypeAlias = npt.NDArray[np.float64]
Law: TypeAlias = Literal["equal", "log-normal", "power-law", "dirichlet"]

SIGMA_MAX = 10.0
EXPONENT_MIN, EXPONENT_MAX = 0.1, 100.0
ALPHA_MIN, ALPHA_MAX = 1e-6, 1e9
_OPTIONS: Mapping[Law, tuple[str, float, float]] = {
    "log-normal": ("sigma", 0.0, SIGMA_MAX),
    "power-law": ("exponent", EXPONENT_MIN, EXPONENT_MAX),
    "dirichlet": ("alpha", ALPHA_MIN, ALPHA_MAX),
}


@dataclass(frozen=True, slots=True)
class SizesSection:
    """How unequal clients are in size: a `law`, and the number that belongs to it."""

    law: Law = "equal"
    sigma: float | None = None  # of log-normal; 0 is equal
    exponent: float | None = None  # of the power law's tail; smaller is more unequal
    alpha: float | None = None  # of dirichlet; smaller is more unequal
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        for law, (name, least, most) in _OPTIONS.items():
            value = getattr(self, name)
            require_option("law", law, self.law, name, value)
            if value is not None:
                require_within(value, name, least, most)


def require_enough(n_samples: int, n_clients: int, least: int) -> None:
    """Raise `ValueError` if there are too few samples for `least` each."""
    if n_samples < n_clients * least:
        raise ValueError(
            f"{n_samples} samples are too few for {n_clients} clients with at least {least} each; "
            "use fewer clients, or a smaller min_samples"
        )


def drawn_sizes(n_samples: int, n_clients: int, least: int, law: SizesSection, rng: np.random.Generator) -> Indices:
    """Sizes of the clients, in no order unless they are equal; they sum to `n_samples`.

    Raises `ValueError` if there are too few samples for `least` each.
    """
    require_enough(n_samples, n_clients, least)
    n_free = n_samples - n_clients * least
    if law.sigma is not None:
        free = _apportioned(n_free, np.exp(law.sigma * rng.standard_normal(n_clients)))
    elif law.exponent is not None:
        free = _apportioned(n_free, (1 - rng.random(n_clients)) ** (-1 / law.exponent))
    elif law.alpha is not None:
        free = rng.multinomial(n_free, dirichlet(np.full(n_clients, law.alpha), rng)).astype(np.int64)
    else:
        free = _apportioned(n_free, np.ones(n_clients))
    return least + free


def iid_partition(sizes: Indices, rng: np.random.Generator) -> tuple[Indices, ...]:
    """Divide samples evenly at random into shards of these sizes."""
    owners = np.repeat(np.arange(len(sizes)), sizes)
    return shards_of(rng.permutation(owners), len(sizes))


def dirichlet(concentration: Floats, rng: np.random.Generator) -> Floats:
    """A draw that also works for tiny concentrations, where every gamma variate may underflow to zero."""
    draw = rng.dirichlet(concentration)
    if 0 < draw.sum() < np.inf:
        return draw
    one_hot = np.zeros(len(concentration))
    one_hot[rng.choice(len(concentration), p=concentration / concentration.sum())] = 1.0
    return one_hot


def _apportioned(n_samples: int, parts: Floats) -> Indices:
    """`n_samples` divided in the ratio of `parts` by largest remainder; of equal ones, the first comes first."""
    exact = n_samples * (parts / parts.sum())
    sizes: Indices = np.floor(exact).astype(np.int64)
    order = np.argsort(sizes - exact, kind="stable")
    sizes[order[: n_samples - int(sizes.sum())]] += 1
    return sizes
