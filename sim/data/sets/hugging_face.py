"""A `DataSet` from loaded data of Hugging Face's `datasets` or Flower's `flwr-datasets`.

```
from datasets import load_dataset
from umbel.sim.data.sets.hugging_face import from_hugging_face
data = from_hugging_face(load_dataset("ylecun/mnist"), input="image", target="label")
```

Neither library is imported here; only documented attributes of their objects are used.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from umbel.sim.data.data_set import DataError, DataSet
from umbel.sim.data.sets.arrays import TEST_SHARE, dataset

Columns: TypeAlias = str | Sequence[str]
_Values: TypeAlias = npt.NDArray[Any]
_COLOURS = (1, 3, 4)


class HuggingFaceTable(Protocol):
    """Such as `datasets.Dataset`."""

    @property
    def column_names(self) -> list[str]: ...
    def __len__(self) -> int: ...
    def with_format(self, type: str, columns: list[str]) -> Self: ...
    def __getitem__(self, rows: slice, /) -> Mapping[str, Any]: ...


class Partitioner(Protocol):
    """Such as those of `flwr_datasets.partitioner`."""

    @property
    def num_partitions(self) -> int: ...
    def load_partition(self, partition_id: int) -> Any: ...


class Partitioned(Protocol):
    """Such as `flwr_datasets.FederatedDataset`."""

    @property
    def partitioners(self) -> Mapping[str, Any]: ...
    def load_split(self, split: str) -> Any: ...


def from_hugging_face(
    data: HuggingFaceTable | Mapping[str, HuggingFaceTable],
    input: Columns,
    target: str,
    *,
    group: str | None = None,
    test_share: float = TEST_SHARE,
    seed: int = 0,
) -> DataSet:
    """A data set of the columns `input`, one that holds an array or several of a number each, and `target`, a class.

    `data`: a `Dataset`, or a `DatasetDict` whose parts "train" and "test" are taken; without a test part, `test_share`
    of each class is held out. `group`: the column of natural holders. Images are scaled to 0 to 1, channels first.
    Raises `DataError` for missing columns, and for columns that are no arrays of one shape.
    """
    train, test = _parts(data)
    groups = None if group is None else _columns(train, [group])[group]
    return dataset(
        _inputs(train, input),
        _targets(train, target),
        test=None if test is None else (_inputs(test, input), _targets(test, target)),
        test_share=test_share,
        groups=groups,
        group_kind=group or "group",
        seed=seed,
    )


def from_partitioner(
    partitioner: Partitioner,
    input: Columns,
    target: str,
    *,
    test: HuggingFaceTable | None = None,
    test_share: float = TEST_SHARE,
    seed: int = 0,
) -> DataSet:
    """The same of the partitions of a Flower partitioner that has been given its data: each is one natural holder."""
    parts: list[HuggingFaceTable] = [partitioner.load_partition(number) for number in range(partitioner.num_partitions)]
    numbers = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return dataset(
        torch.cat([_inputs(part, input) for part in parts]),
        np.concatenate([_targets(part, target) for part in parts]),
        test=None if test is None else (_inputs(test, input), _targets(test, target)),
        test_share=test_share,
        groups=numbers,
        group_kind="partition",
        seed=seed,
    )


def from_flwr_datasets(
    data: Partitioned, input: Columns, target: str, *, split: str = "train", test_split: str | None = "test"
) -> DataSet:
    """The same of a `FederatedDataset`: the partitions of `split`, and `test_split` to measure on.

    With `test_split` None, a share of the partitions is held out.
    """
    if split not in data.partitioners:
        raise DataError(
            f"the federated data set has no partitions of {split!r}, only of {_listed(data.partitioners)}; choose one"
        )
    test = None if test_split is None else data.load_split(test_split)
    return from_partitioner(data.partitioners[split], input, target, test=test)


def _parts(data: HuggingFaceTable | Mapping[str, HuggingFaceTable]) -> tuple[HuggingFaceTable, HuggingFaceTable | None]:
    if not isinstance(data, Mapping):
        return data, None
    if "train" not in data:
        raise DataError(f"the data has no part 'train', only {_listed(data)}; give one of these parts instead")
    return data["train"], data.get("test")


def _inputs(table: HuggingFaceTable, input: Columns) -> Tensor:
    names = [input] if isinstance(input, str) else list(input)
    columns = _columns(table, names)
    values = columns[names[0]] if isinstance(input, str) else np.column_stack([columns[name] for name in names])
    if values.dtype.kind not in "biuf":
        raise DataError(
            f"column {input!r} must hold numbers, all of one shape; pad, crop or encode it with map() first"
        )
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return _image(tensor) if tensor.dtype == torch.uint8 and tensor.ndim > 2 else tensor


def _image(pixels: Tensor) -> Tensor:
    """(n, height, width) or (n, height, width, channels) bytes -> (n, channels, height, width) between 0 and 1."""
    if pixels.ndim == 3:
        pixels = pixels.unsqueeze(1)
    elif pixels.ndim == 4 and pixels.shape[3] in _COLOURS:
        pixels = pixels.permute(0, 3, 1, 2)
    return pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(255)


def _targets(table: HuggingFaceTable, target: str) -> _Values:
    return _columns(table, [target])[target]


def _columns(table: HuggingFaceTable, names: list[str]) -> Mapping[str, _Values]:
    """Whole columns as arrays; images and the like are decoded by the library."""
    if missing := [name for name in names if name not in table.column_names]:
        raise DataError(f"there is no column {missing[0]!r}; the columns are {_listed(table.column_names)}")
    rows = table.with_format("numpy", columns=names)[:]
    return {name: np.asarray(rows[name]) for name in names}


def _listed(names: Mapping[str, Any] | Sequence[str]) -> str:
    return ", ".join(map(repr, names))
