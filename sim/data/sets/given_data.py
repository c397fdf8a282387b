"""Data that a program gives to `simulate`: arrays, torch data sets, or one of these for each client."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from umbel.sim.data.data_set import DataError, DataSet, SampleSet, TrainAndTest
from umbel.sim.data.sets.arrays import are_classes, dataset, from_samples, items_of, of_other_targets

Part: TypeAlias = Dataset[Any] | SampleSet | tuple[npt.ArrayLike | Tensor, npt.ArrayLike | Tensor]
Train: TypeAlias = Part | Sequence[Part]
GivenData: TypeAlias = DataSet | TrainAndTest | Train | tuple[Train, Part]

_OF_NO_CLASSES = ("regression", "multi-label", "tokens")
_FORMS = (
    "give a data set, a pair (inputs, targets), a list with one of these for each client, or a pair (train, test) of "
    "these"
)


def is_for_clients(data: GivenData) -> bool:
    """Whether these are data of each client: a list, or a list and a test set."""
    train, _ = _train_and_test(data)
    return isinstance(train, list)


def data_set_of(data: GivenData, loss: object = None) -> DataSet:
    """The data set. Without a test set a fifth of each class is held out. Raises `DataError` for other data.

    `loss`: as `simulate` gets it. Targets that are no classes need one that is not of classes.
    """
    if isinstance(data, DataSet):
        return data
    if isinstance(data, TrainAndTest):
        return from_samples(data)
    train, test = _train_and_test(data)
    measured = None if test is None else _pair(test)
    if not isinstance(train, list):
        inputs, targets = _pair(train)
        return _maker(targets, loss)(inputs, targets, test=measured)
    parts = [_pair(part) for part in train]
    if not parts:
        raise DataError("the list of data sets is empty; give one for each client")
    width = len(str(len(parts) - 1))
    groups = np.repeat([f"client {number:0{width}}" for number in range(len(parts))], [len(part[1]) for part in parts])
    inputs, targets = _joined(parts)
    made = _maker(targets, loss)(inputs, targets, test=measured, groups=groups, group_kind="client")
    found = () if made.natural is None else made.natural.names
    if len(found) < len(parts):
        raise DataError(
            f"{len(parts) - len(found)} of {len(parts)} clients would have no sample to train on, because samples are "
            "held out to measure models on; give the test set yourself, as data=([...], test)"
        )
    return made


def _maker(targets: Any, loss: object) -> Callable[..., DataSet]:
    """What makes a data set with these targets. Targets that are classes stay classes, if the loss may want them."""
    if loss in (None, "classes"):
        return dataset
    return dataset if are_classes(targets) and loss not in _OF_NO_CLASSES else of_other_targets


def _train_and_test(data: Any) -> tuple[Any, Any]:
    """Both parts, the second None if it is not given. A pair is of parts if its first one is no array."""
    if isinstance(data, tuple) and len(data) == 2:
        first, second = data
        if isinstance(first, Dataset | SampleSet | tuple) or _is_list_of_parts(first):
            return first, second
    if isinstance(data, list) and not _is_list_of_parts(data):
        raise DataError(f"data is a list of other things than data sets; {_FORMS}")
    return data, None


def _is_list_of_parts(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return all(isinstance(one, Dataset | SampleSet | tuple) for one in value)


def _pair(part: Any) -> tuple[Any, Any]:
    """Inputs and targets."""
    match part:
        case SampleSet():
            return part.inputs, part.targets
        case TensorDataset() if len(part.tensors) == 2:
            return part.tensors[0], part.tensors[1]
        case Dataset():
            return items_of(part)
        case tuple() if len(part) == 2:
            inputs, targets = part
            return inputs, targets
        case _:
            raise DataError(f"data has a {type(part).__name__}; {_FORMS}")


def _joined(parts: Sequence[tuple[Any, Any]]) -> tuple[Tensor, npt.NDArray[Any]]:
    """Raises `DataError` for inputs of different shapes."""
    inputs = [torch.as_tensor(one) for one, _ in parts]
    if len({one.shape[1:] for one in inputs}) > 1:
        raise DataError("the inputs of all clients must have the same shape; pad or crop them first")
    return torch.cat(inputs), np.concatenate([np.asarray(one) for _, one in parts])
