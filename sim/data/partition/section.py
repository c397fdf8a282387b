"""The `[partition]` section of an experiment's file: how the training data are divided among clients.

```toml
[partition]
scheme = "dirichlet"                          # iid, dirichlet, shards, classes or natural
clients = 100
alpha = 0.3
sizes = { law = "log-normal", sigma = 1.0 }   # of iid, and of dirichlet by client
features = { kind = "noise", variance = 0.1 } # with any scheme
holdout = 0.1                                 # of each client's samples, to measure models on
```

With `natural`, `only = ["cleveland", "va"]` makes clients of these groups alone.

Label skew, quantity skew and feature skew are three choices that go together: quantity skew alone is `scheme = "iid"`
with `sizes`, feature skew alone is `scheme = "iid"` with `features`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.types import require_within
from umbel.sim.data.partition.feature_skew import FeaturesSection, transform_of
from umbel.sim.data.partition.labels import (
    classes_partition,
    dirichlet_by_class,
    dirichlet_by_client,
    shard_partition,
)
from umbel.sim.data.partition.partition import (
    ALPHA_MAX,
    ALPHA_MIN,
    Indices,
    Labels,
    Partition,
    SizesSection,
    Transform,
    drawn_sizes,
    iid_partition,
    natural_partition,
    require_option,
    with_holdouts,
)

Scheme: TypeAlias = Literal["iid", "dirichlet", "shards", "classes", "natural"]

CLIENTS_MAX = 10_000_000
EACH_MAX = 1_000_000
HOLDOUT_MAX = 0.99
_NEEDED: Mapping[Scheme, str] = {"dirichlet": "alpha", "shards": "shards_each", "classes": "classes_each"}


@dataclass(frozen=True, slots=True)
class PartitionSection:
    """How data are divided among clients."""

    scheme: Scheme = "iid"
    clients: int | None = None  # None: all groups of `natural`
    min_samples: int = 1  # of each client at least
    alpha: float | None = None  # label skew of `dirichlet`; smaller is more skewed
    by: Literal["client", "class"] = "client"  # each client draws its classes, or each class its clients
    balanced: bool = False  # with by = "class": a client with the mean number of samples gets no more
    shards_each: int | None = None  # of a client, with `shards`
    classes_each: int | None = None  # of a client, with `classes`
    sizes: SizesSection = field(default_factory=SizesSection)
    features: FeaturesSection | None = None
    holdout: float = 0.0  # share of its samples that a client holds back
    only: tuple[str, ...] | None = None  # names of the groups of `natural` that are clients; None: all
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        self._check_options()
        if self.clients is not None:
            require_within(self.clients, "clients", 1, CLIENTS_MAX)
        elif self.scheme != "natural":
            raise ValueError(f'scheme = "{self.scheme}" needs the number of clients; set clients')
        require_within(self.min_samples, "min_samples", 1, EACH_MAX)
        require_within(self.holdout, "holdout", 0.0, HOLDOUT_MAX)

    def _check_options(self) -> None:
        if self.scheme != "natural":
            require_option("scheme", "natural", self.scheme, "only", self.only)
        if self.only == ():
            raise ValueError("`only` is empty; name a group in it, or leave it out to use all groups")
        for scheme, name in _NEEDED.items():
            value = getattr(self, name)
            require_option("scheme", scheme, self.scheme, name, value)
            if value is not None:
                require_within(value, name, *((ALPHA_MIN, ALPHA_MAX) if name == "alpha" else (1, EACH_MAX)))
        if self.by == "class" and self.scheme != "dirichlet":
            raise ValueError(
                f'by = "class" is for scheme = "dirichlet", not for scheme = "{self.scheme}"; leave it out'
            )
        if self.balanced and self.by != "class":
            raise ValueError('`balanced` is only for scheme = "dirichlet" with by = "class"; leave it out')
        if self.sizes.law != "equal" and not self._takes_sizes:
            raise ValueError(
                '`sizes` is only for scheme = "iid", and for scheme = "dirichlet" with by = "client". '
                f'Here scheme = "{self.scheme}" decides the sizes; leave `sizes` out'
            )

    @property
    def _takes_sizes(self) -> bool:
        return self.scheme == "iid" or (self.scheme == "dirichlet" and self.by == "client")

    @property
    def n_clients(self) -> int:
        """The number of clients, unless it follows from the groups."""
        assert self.clients is not None, "the section has checked it"
        return self.clients


def split(
    section: PartitionSection,
    labels: npt.NDArray[Any],
    seed: int,
    groups: npt.NDArray[Any] | None = None,
    group_names: Sequence[str] | None = None,
) -> Partition:
    """Divide the training samples. The same arguments give the same partition.

    `labels`: of each training sample; schemes that use labels need one whole number each. `groups`: each sample's
    natural holder, a number or a text; `group_names`: of groups that are numbers, by number. Raises `ValueError`, with
    what to do, if the data cannot be divided like this.
    """
    partition = _dealt(section, labels, derive_seed(seed, "partition"), groups, group_names)
    if (least := int(partition.sizes.min())) < section.min_samples:
        raise ValueError(
            f'with scheme = "{section.scheme}" a client would get {least} samples, but min_samples is '
            f"{section.min_samples}; use fewer clients, or a smaller min_samples"
        )
    return with_holdouts(partition, section.holdout, derive_seed(seed, "holdout"))


def features(section: PartitionSection, n_clients: int, seed: int) -> Transform | None:
    """How the inputs of a partition's clients differ; None: they do not."""
    return (
        None if section.features is None else transform_of(section.features, n_clients, derive_seed(seed, "features"))
    )


def _dealt(
    section: PartitionSection,
    labels: npt.NDArray[Any],
    seed: int,
    groups: npt.NDArray[Any] | None,
    group_names: Sequence[str] | None,
) -> Partition:
    rng = np.random.default_rng(seed)
    if section.scheme == "natural":
        if groups is None:
            raise ValueError(
                'scheme = "natural" needs the holder of each sample, but this data set names none; choose another '
                "scheme, or give `groups` if the data set is your own"
            )
        return natural_partition(groups, section.min_samples, section.clients, rng, group_names, section.only)
    if section.scheme == "iid":
        return Partition(iid_partition(_sizes(section, len(labels), rng), rng))
    return Partition(_by_label(section, _one_each(labels, section.scheme), seed, rng))


def _by_label(section: PartitionSection, labels: Labels, seed: int, rng: np.random.Generator) -> tuple[Indices, ...]:
    if section.shards_each is not None:
        return shard_partition(labels, section.n_clients, section.shards_each, seed)
    if section.classes_each is not None:
        return classes_partition(labels, section.n_clients, section.classes_each, rng)
    assert section.alpha is not None, "the section has checked it"
    if section.by == "client":
        return dirichlet_by_client(labels, _sizes(section, len(labels), rng), section.alpha, rng)
    return dirichlet_by_class(labels, section.n_clients, section.alpha, section.min_samples, section.balanced, rng)


def _sizes(section: PartitionSection, n_samples: int, rng: np.random.Generator) -> Indices:
    return drawn_sizes(n_samples, section.n_clients, section.min_samples, section.sizes, rng)


def _one_each(labels: npt.NDArray[Any], scheme: str) -> Labels:
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f'scheme = "{scheme}" looks at the class of each sample, but these targets have shape {labels.shape} '
            f'and are {labels.dtype}; choose "iid" or "natural"'
        )
    return labels.astype(np.int64)
