"""How different clients are, in numbers: by the classes they hold, and by how much they hold.

With p_k(y) the share of class y in client k's data and p(y) that in all clients' data together:

    total variation     1/2 sum_y |p_k(y) - p(y)|, 0 to 1
    earth mover's       sum_y |p_k(y) - p(y)|, 0 to 2, as Zhao, Li, Lai, Suda, Civin and Chandra 2018, "Federated
    distance            Learning with Non-IID Data" (arXiv:1806.00582), define it: all classes are equally far apart
    Jensen-Shannon      1/2 KL(p_k || m) + 1/2 KL(p || m) with m = (p_k + p) / 2, in bits, 0 to 1: Lin 1991, "Divergence
    divergence          measures based on the Shannon entropy"
    effective classes   exp(-sum_y p_k(y) ln p_k(y)), the Hill number of order 1: the number of equally frequent classes
                        with that entropy; Hill 1973, "Diversity and Evenness"

With n_k the number of client k's samples, K clients:

    Gini coefficient    sum_jk |n_j - n_k| / (2 K sum_k n_k), 0 if all are equal, towards 1 if one has all
    variation           standard deviation of the n_k over their mean
    effective clients   (sum_k n_k)^2 / sum_k n_k^2, Kish's effective size: a mean weighted by samples has the variance
                        of one over that many clients of equal weight; Kish 1965, "Survey Sampling"

Means over clients count each client once.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from umbel.sim.data.partition.partition import Indices, Labels, Partition, class_counts

Floats: TypeAlias = npt.NDArray[np.float64]
_BLOCK = 1 << 22  # of clients times classes


@dataclass(frozen=True, slots=True)
class SizeSkew:
    """How unequal clients are in their numbers of training samples."""

    least: int
    median: float
    greatest: int
    gini: float
    variation: float
    effective_clients: float


@dataclass(frozen=True, slots=True)
class LabelSkew:
    """How far clients' class mixtures are from that of all clients; of clients that hold any sample."""

    n_classes: int
    total_variation_mean: float
    total_variation_max: float
    jensen_shannon_mean: float
    jensen_shannon_max: float
    earth_mover_mean: float
    earth_mover_max: float
    effective_classes_mean: float
    effective_classes_min: float
    effective_classes_of_all: float


@dataclass(frozen=True, slots=True)
class Heterogeneity:
    """How different clients are. `labels`: None if targets are no classes."""

    n_clients: int
    n_samples: int
    sizes: SizeSkew
    labels: LabelSkew | None

    def facts(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    def lines(self) -> tuple[str, ...]:
        """In words, a line each."""
        sizes = self.sizes
        counts = (
            f"{self.n_clients:,} clients train on {self.n_samples:,} samples",
            f"samples per client: {sizes.least:,} to {sizes.greatest:,}, median {sizes.median:,.6g}",
            f"inequality of sizes: Gini {sizes.gini:.2f}, variation {sizes.variation:.2f}",
            f"weighted by samples, they count as {sizes.effective_clients:,.1f} equal clients",
        )
        return counts if self.labels is None else counts + _label_lines(self.labels)


def heterogeneity(partition: Partition, labels: npt.NDArray[Any] | None) -> Heterogeneity:
    """Compare the clients' training data. `labels`: of each sample of the data set; None, or not one whole number each,
    if they are no classes.
    """
    sizes = partition.sizes
    return Heterogeneity(
        n_clients=partition.n_clients,
        n_samples=int(sizes.sum()),
        sizes=_size_skew(sizes),
        labels=_label_skew(partition, labels.astype(np.int64)) if labels is not None and are_classes(labels) else None,
    )


def are_classes(labels: npt.NDArray[Any]) -> bool:
    """Whether targets are one class per sample."""
    return labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer)


def _label_lines(labels: LabelSkew) -> tuple[str, ...]:
    return (
        f"total variation from the whole: mean {labels.total_variation_mean:.2f}, max {labels.total_variation_max:.2f}",
        f"Jensen-Shannon divergence: mean {labels.jensen_shannon_mean:.2f}, max {labels.jensen_shannon_max:.2f} bits",
        f"earth mover's distance (Zhao et al.): mean {labels.earth_mover_mean:.2f}, max {labels.earth_mover_max:.2f}",
        f"effective classes per client: mean {labels.effective_classes_mean:.1f}, "
        f"least {labels.effective_classes_min:.1f}",
        f"effective classes of all together: {labels.effective_classes_of_all:.1f} of {labels.n_classes:,}",
    )


def _size_skew(sizes: Indices) -> SizeSkew:
    total = int(sizes.sum())
    if total == 0:
        raise ValueError("no client holds a sample; there is nothing to compare")
    rank = 2 * np.arange(1, len(sizes) + 1) - len(sizes) - 1
    return SizeSkew(
        least=int(sizes.min()),
        median=float(np.median(sizes)),
        greatest=int(sizes.max()),
        gini=float((rank * np.sort(sizes)).sum() / (len(sizes) * total)),
        variation=float(sizes.std() / sizes.mean()),
        effective_clients=total**2 / float((sizes.astype(np.float64) ** 2).sum()),
    )


def _label_skew(partition: Partition, labels: Labels) -> LabelSkew:
    classes = np.unique(labels)
    blocks = list(_blocks(partition, len(classes)))
    of_all = sum((class_counts(labels, block, classes).sum(0) for block in blocks), np.zeros(len(classes), np.int64))
    whole = of_all / of_all.sum()
    measures = np.concatenate([_measures(class_counts(labels, block, classes), whole) for block in blocks], axis=1)
    far, divergence, diverse = measures
    return LabelSkew(
        n_classes=len(classes),
        total_variation_mean=float(far.mean()),
        total_variation_max=float(far.max()),
        jensen_shannon_mean=float(divergence.mean()),
        jensen_shannon_max=float(divergence.max()),
        earth_mover_mean=float(2 * far.mean()),
        earth_mover_max=float(2 * far.max()),
        effective_classes_mean=float(diverse.mean()),
        effective_classes_min=float(diverse.min()),
        effective_classes_of_all=float(np.exp(_entropies(whole[None])[0])),
    )


def _blocks(partition: Partition, n_classes: int) -> Iterator[tuple[Indices, ...]]:
    """The shards in blocks, so that not all clients' counts are held at once."""
    step = max(1, _BLOCK // n_classes)
    for first in range(0, partition.n_clients, step):
        yield partition.shards[first : first + step]


def _measures(counts: Indices, whole: Floats) -> Floats:
    """Of each client with any sample: total variation, Jensen-Shannon divergence, effective classes. Shape (3, k)."""
    held = counts[counts.sum(1) > 0]
    shares = held / held.sum(1, keepdims=True)
    far = np.abs(shares - whole).sum(1) / 2
    between = _entropies((shares + whole) / 2) - (_entropies(shares) + _entropies(whole[None])) / 2
    divergence = np.clip(between / np.log(2), 0.0, 1.0)  # equal mixtures may give -1e-16
    return np.stack([far, divergence, np.exp(_entropies(shares))])


def _entropies(shares: Floats) -> Floats:
    """In nats, of each row."""
    surprises: Floats = -np.log(np.where(shares > 0, shares, 1.0))
    entropies: Floats = (shares * surprises).sum(1)
    return entropies
