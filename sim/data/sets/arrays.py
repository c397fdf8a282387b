"""Data sets of your own: from arrays, and from any torch data set with a length.

```
from umbel.sim.data.sets.arrays import dataset
data = dataset(images, digits, test=(test_images, test_digits))
```
"""

from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from umbel.aggregation.seeds import derive_seed
from umbel.sim.data.data_set import DataError, DataSet, LearningTask, SampleSet, TrainAndTest, held_out, natural_of

TEST_SHARE = 0.2
CLASSES_MAX = 1_000_000  # a model has an output for each
_DOUBLE_BYTES = 8
_TAKEN_AS = {
    **dict.fromkeys((torch.float64, torch.float16, torch.bool), torch.float32),
    **dict.fromkeys((torch.uint16, torch.uint32, torch.uint64), torch.int64),  # torch hardly computes with these
}
Arrays = tuple[npt.ArrayLike | Tensor, npt.ArrayLike | Tensor]


def dataset(
    inputs: npt.ArrayLike | Tensor,
    targets: npt.ArrayLike | Tensor,
    *,
    test: Arrays | None = None,
    test_share: float = TEST_SHARE,
    groups: Sequence[str] | Sequence[int] | npt.NDArray[Any] | None = None,
    group_kind: str = "group",
    n_classes: int | None = None,
    name: str = "own data",
    seed: int = 0,
) -> DataSet:
    """A data set of `inputs` (n, ...) and `targets`: n whole numbers from 0 on, or n texts, each a class.

    `test`: inputs and targets to measure on; without them, `test_share` of each class is held out, drawn from `seed`.
    `groups`: each sample's natural holder, such as a user's name, which holds it back if it is held out. `n_classes`:
    if not all of them occur. Inputs of 64-bit floats become 32-bit ones. Raises `DataError` for unusable data.
    """
    all_inputs, all_targets = _inputs(inputs, "inputs"), _array(targets)
    test_targets = None if test is None else _array(test[1])
    classes, n_found = _classes(all_targets, test_targets)
    n_classes = n_found if n_classes is None else n_classes
    if n_found > n_classes:
        raise DataError(f"the targets have {n_found} classes, so n_classes must be at least {n_found}, not {n_classes}")
    samples = _paired(all_inputs, classes[: len(all_targets)], "inputs")
    if groups is not None and len(groups) != len(samples):
        raise DataError(f"there are {len(samples)} samples and {len(groups)} groups; name the group of each sample")
    if test is None:
        rows, held = held_out(classes, test_share, derive_seed(seed, "test set"))
        measured = samples.take(held)
    else:
        rows, held = np.arange(len(samples)), np.empty(0, dtype=np.int64)
        measured = _paired(_inputs(test[0], "test inputs"), classes[len(all_targets) :], "test inputs")
        if measured.inputs.shape[1:] != samples.inputs.shape[1:]:
            raise DataError(
                f"each test input has the shape {tuple(measured.inputs.shape[1:])}, but each training input has "
                f"the shape {tuple(samples.inputs.shape[1:])}; give all inputs the same shape"
            )
    holders = None if groups is None else natural_of(group_kind, _array(groups), rows, held)
    return DataSet(name, samples, rows, measured, n_classes, holders)


def of_other_targets(
    inputs: npt.ArrayLike | Tensor,
    targets: npt.ArrayLike | Tensor,
    *,
    test: Arrays | None = None,
    groups: npt.NDArray[Any] | None = None,
    group_kind: str = "group",
) -> DataSet:
    """A data set whose targets (n, ...) are no classes, such as measurements: the task is "other".

    The rest is as for `dataset`, but `test_share` is held out of all samples. Raises `DataError` for unusable data.
    """
    samples = _in_pairs(inputs, targets, "inputs")
    if test is None:
        rows, held = held_out(np.zeros(len(samples), dtype=np.int64), TEST_SHARE, derive_seed(0, "test set"))
        measured = samples.take(held)
    else:
        rows, held, measured = np.arange(len(samples)), np.empty(0, dtype=np.int64), _in_pairs(*test, "test inputs")
    holders = None if groups is None else natural_of(group_kind, groups, rows, held)
    return DataSet("own data", samples, rows, measured, 0, holders, LearningTask.OTHER)


def _in_pairs(inputs: npt.ArrayLike | Tensor, targets: npt.ArrayLike | Tensor, what: str) -> SampleSet:
    found, wanted = _inputs(inputs, what), _inputs(targets, "the targets")
    if not found.ndim or not wanted.ndim or len(found) != len(wanted) or not len(found):
        raise DataError(f"the data set needs one target for each of the {what}, and must not be empty")
    return SampleSet(found, wanted)


def are_classes(targets: npt.ArrayLike | Tensor) -> bool:
    """Whether targets are one whole number, or one text, for each sample."""
    found = _array(targets)
    return found.ndim == 1 and found.dtype.kind in "biuUS"


def from_torch(
    train: Dataset[Any], test: Dataset[Any] | None = None, *, test_share: float = TEST_SHARE, seed: int = 0
) -> DataSet:
    """A data set of two torch data sets whose items are pairs of input and class.

    Every item is read once, so a random transform applies once. Raises `DataError` for a data set without a length.
    """
    measured = None if test is None else items_of(test)
    return dataset(*items_of(train), test=measured, test_share=test_share, seed=seed)


def from_samples(data: TrainAndTest, name: str = "own data") -> DataSet:
    """A data set of samples as they are."""
    return dataset(data.train.inputs, data.train.targets, test=(data.test.inputs, data.test.targets), name=name)


def items_of(data: Dataset[Any]) -> tuple[Tensor, npt.NDArray[Any]]:
    """The inputs (n, ...) and the classes (n,) of a torch data set of pairs. Raises `DataError` for another one."""
    if not isinstance(data, Sized):
        raise DataError("the data set needs a length (__len__), because its samples are divided among clients")
    pairs = [data[number] for number in range(len(data))]
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise DataError("each item of the data set must be a pair of an input and a class")
    inputs = [_inputs(pair[0], "an input") for pair in pairs]
    if len({one.shape for one in inputs}) > 1:
        raise DataError("all inputs must have the same shape; pad or crop them first")
    return (torch.stack(inputs) if inputs else torch.empty(0)), np.array([int(pair[1]) for pair in pairs], np.int64)


def _inputs(values: npt.ArrayLike | Tensor, what: str) -> Tensor:
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
    else:
        array = np.asarray(values)
        if array.dtype.kind not in "biuf":
            raise DataError(f"{what} must be numbers in one array, not {array.dtype}; pad, crop or encode them first")
        is_long = array.dtype.kind == "f" and array.dtype.itemsize > _DOUBLE_BYTES
        known = np.float64 if is_long else array.dtype.newbyteorder("=")
        tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=known))
    taken = tensor.to(_TAKEN_AS.get(tensor.dtype, tensor.dtype))
    if taken.is_floating_point() and not bool(taken.isfinite().all()):
        raise DataError(
            f"not all numbers of {what} are finite (some are nan or inf); leave those samples out, or replace them"
        )
    if 0 in taken.shape[1:]:
        raise DataError(
            f"there are no numbers in {what}: a size in the shape {tuple(taken.shape)} is 0; check how the data are "
            "loaded"
        )
    return taken


def _array(values: npt.ArrayLike | Tensor) -> npt.NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _classes(train: npt.NDArray[Any], test: npt.NDArray[Any] | None) -> tuple[npt.NDArray[np.int64], int]:
    """The class of every sample, those of the test set last, and the number of classes."""
    targets = train if test is None else np.concatenate([train, test])
    if targets.ndim != 1 or not len(targets):
        raise DataError("targets must be one class for each input, and must not be empty")
    if targets.dtype.kind in "US":
        names, numbers = np.unique(targets, return_inverse=True)
        return numbers.astype(np.int64), len(names)
    if targets.dtype.kind not in "biu" or targets.min() < 0:
        raise DataError(
            f"targets must be whole numbers from 0 on, or strings, not {targets.dtype} such as {targets[0]}"
        )
    if (greatest := int(targets.max())) >= CLASSES_MAX:
        raise DataError(
            f"there are targets up to {greatest}, but they must be below {CLASSES_MAX}; number the classes from 0 on, "
            "or name them by strings"
        )
    return targets.astype(np.int64), greatest + 1


def _paired(inputs: Tensor, classes: npt.NDArray[np.int64], what: str) -> SampleSet:
    if inputs.ndim < 1 or len(inputs) != len(classes):
        raise DataError(f"the data set needs one target (class) for each of the {what}")
    return SampleSet(inputs, torch.from_numpy(classes))
