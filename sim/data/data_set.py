"""A data set before it is partitioned: samples for training and testing, and their natural holders."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from umbel.aggregation.seeds import derive_seed
from umbel.sim.data.partition.partition import Indices, shards_of


@dataclass(frozen=True, slots=True)
class SampleSet:
    """`inputs`: (n, ...), of whatever type the model takes. `targets`: int64 (n,), classes from 0 on; of the task
    "other" whatever the loss takes, (n, ...).
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: Indices) -> "SampleSet":
        chosen = torch.from_numpy(indices)
        return SampleSet(self.inputs[chosen], self.targets[chosen])

    @property
    def pairs(self) -> TensorDataset:
        """As a data set of torch, of pairs of input and target."""
        return TensorDataset(self.inputs, self.targets)


@dataclass(frozen=True, slots=True)
class TrainAndTest:
    """Samples for training, and samples for testing."""

    train: SampleSet
    test: SampleSet


@dataclass(frozen=True, slots=True)
class Score:
    """`accuracy`: share of right answers, 0 to 1; `loss`: mean cross-entropy in nats."""

    accuracy: float
    loss: float


def score(model: nn.Module, samples: SampleSet) -> Score:
    """The score of `model` on held-out samples."""
    model.eval()
    with torch.no_grad():
        logits = model(samples.inputs)
    loss = nn.functional.cross_entropy(logits, samples.targets)
    return Score((logits.argmax(1) == samples.targets).double().mean().item(), loss.item())


class DataError(ValueError):
    """Data are missing or invalid: one sentence that says what to do."""


class LearningTask(StrEnum):
    """What a model predicts: the class of an input, the next character of a text, or what only the loss knows."""

    CLASSIFICATION = "classification"
    NEXT_CHARACTER = "next-character"
    OTHER = "other"


class Described(Protocol):
    """What a model must know of its data. `input_shape`: of one input."""

    @property
    def name(self) -> str: ...
    @property
    def task(self) -> LearningTask: ...
    @property
    def n_classes(self) -> int: ...
    @property
    def input_shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Natural:
    """The natural holders of a data set's samples."""

    kind: str  # of holder, such as "hospital"
    names: tuple[str, ...]
    shards: tuple[Indices, ...]  # the rows of `samples` that each trains on, at least one
    holdouts: tuple[Indices, ...]  # the rows that each holds back to measure models on

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.shards) == len(self.holdouts):
            raise ValueError("each natural holder needs a name, a shard and a holdout")
        if empty := [name for name, shard in zip(self.names, self.shards, strict=True) if not len(shard)]:
            raise DataError(f"{self.kind} {empty[0]!r} has no sample to train on; leave it out")


@dataclass(frozen=True, slots=True)
class DataSet:
    """Samples and how they are used. Targets are classes from 0 to `n_classes` - 1, unless the task is "other"."""

    name: str
    samples: SampleSet  # all that clients can hold
    rows: Indices  # int64, ascending, of the training samples; others are held back in `natural`, or unused
    test: SampleSet  # to measure the model in one place
    n_classes: int
    natural: Natural | None = None
    task: LearningTask = LearningTask.CLASSIFICATION

    def __post_init__(self) -> None:
        if not len(self.rows):
            raise DataError(f"{self.name} has no sample to train on")

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.samples.inputs.shape[1:])

    @property
    def labels(self) -> Indices:
        """The target of each of `rows`."""
        return self.samples.targets.numpy()[self.rows]

    @property
    def groups(self) -> Indices | None:
        """The number of each row's holder in `natural`; None without natural holders."""
        if self.natural is None:
            return None
        holder = np.full(len(self.samples), -1, dtype=np.int64)
        for number, shard in enumerate(self.natural.shards):
            holder[shard] = number
        return holder[self.rows]

    def whole(self) -> TrainAndTest:
        """All training samples together, and the test set."""
        is_all = len(self.rows) == len(self.samples)
        return TrainAndTest(self.samples if is_all else self.samples.take(self.rows), self.test)

    def limited(self, train_limit: int | None, test_limit: int | None, seed: int) -> "DataSet":
        """The same with at most this many samples, drawn from `seed`. Leaves out holders without training samples."""
        limited = self
        if test_limit is not None and test_limit < len(self.test):
            kept = _drawn(np.arange(len(self.test)), test_limit, derive_seed(seed, "test limit"))
            limited = replace(limited, test=self.test.take(kept))
        if train_limit is not None and train_limit < len(self.rows):
            rows = _drawn(self.rows, train_limit, derive_seed(seed, "train limit"))
            limited = replace(limited, rows=rows, natural=self.natural and _among(self.natural, rows))
        return limited


def natural_of(kind: str, groups: npt.NDArray[Any], rows: Indices, held: Indices) -> Natural:
    """The holders that `groups` names for each sample, in the order of their names or numbers.

    They train on their own of `rows` and hold back their own of `held`. Holders without any of `rows` are left out.
    """
    names, numbers = np.unique(groups, return_inverse=True)
    shards, holdouts = ([some[own] for own in shards_of(numbers[some], len(names))] for some in (rows, held))
    return _trained(kind, [str(name) for name in names], shards, holdouts)


def held_out(labels: Indices, share: float, seed: int) -> tuple[Indices, Indices]:
    """The positions to train on, and those to hold out: about `share` of each class, at least one in all.

    Raises `DataError` for no such share, or where nothing would be left to train on.
    """
    if not 0 <= share <= 1:
        raise DataError(f"test_share must lie between 0 and 1, not {share}")
    n_out = max(1, int(np.ceil(round(share * len(labels), 9))))
    if n_out >= len(labels):
        raise DataError(
            f"{n_out} of {len(labels)} samples would be held out, and none left to train on; choose a smaller "
            "test_share"
        )
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    out = by_class[((np.arange(n_out) + rng.random()) * len(labels) / n_out).astype(np.int64)]
    return np.setdiff1d(np.arange(len(labels)), out), np.sort(out)


def _drawn(rows: Indices, n: int, seed: int) -> Indices:
    return np.sort(np.random.default_rng(seed).choice(rows, n, replace=False))


def _among(natural: Natural, rows: Indices) -> Natural:
    is_kept = np.zeros(1 + max(int(shard.max()) for shard in natural.shards), dtype=bool)
    is_kept[rows] = True
    shards = [shard[is_kept[shard]] for shard in natural.shards]
    return _trained(natural.kind, natural.names, shards, natural.holdouts)


def _trained(kind: str, names: Sequence[str], shards: Sequence[Indices], holdouts: Sequence[Indices]) -> Natural:
    """The holders that have a sample to train on."""
    kept = [one for one in zip(names, shards, holdouts, strict=True) if len(one[1])]
    return Natural(kind, *(zip(*kept, strict=True) if kept else ((), (), ())))
