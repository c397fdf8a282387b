"""Arrays and torch data sets become data sets, and what cannot be trained on is refused with a sentence."""

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from umbel.sim.data.data_set import DataError, SampleSet, TrainAndTest
from umbel.sim.data.sets.arrays import dataset, from_samples, from_torch

INPUTS = np.arange(60.0).reshape(20, 3)
TARGETS = [0, 1, 2, 3] * 5


def test_without_a_test_part_a_fifth_of_each_class_is_held_out_and_is_nobody_s() -> None:
    data = dataset(INPUTS, TARGETS, seed=4)
    assert (len(data.rows), len(data.test), data.n_classes, data.input_shape) == (16, 4, 4, (3,))
    assert sorted(data.test.targets.tolist()) == [0, 1, 2, 3]
    assert data.samples.inputs.dtype == torch.float32
    held = {tuple(row) for row in data.test.inputs.tolist()}
    assert held.isdisjoint(tuple(row) for row in data.whole().train.inputs.tolist())
    assert np.array_equal(data.rows, dataset(INPUTS, TARGETS, seed=4).rows)
    assert not np.array_equal(data.rows, dataset(INPUTS, TARGETS, seed=5).rows)


def test_with_a_test_part_everything_else_is_trained_on() -> None:
    data = dataset(torch.ones(4, 2, dtype=torch.uint8), torch.tensor([0, 1, 0, 1]), test=(np.ones((2, 2)), [1, 2]))
    assert data.rows.tolist() == [0, 1, 2, 3]
    assert data.test.targets.tolist() == [1, 2]
    assert data.n_classes == 3, "a class that only the test part has is one"
    assert data.samples.inputs.dtype == torch.uint8, "models may take whole numbers, such as characters"


@pytest.mark.parametrize("dtype", [">f4", "longdouble", "<u2", ">i8", "uint64"])
def test_numbers_of_any_kind_are_taken(dtype: str) -> None:
    data = dataset(INPUTS.astype(dtype), np.array(TARGETS, np.uint8))
    assert data.samples.inputs.tolist() == INPUTS.tolist()
    assert data.samples.inputs.dtype in (torch.float32, torch.int64)
    assert data.samples.targets.tolist() == TARGETS


def test_texts_are_classes_in_the_order_of_the_alphabet_in_both_parts() -> None:
    data = dataset(INPUTS[:3], ["pear", "apple", "pear"], test=(INPUTS[:2], ["fig", "pear"]))
    assert data.samples.targets.tolist() == [2, 0, 2]
    assert data.test.targets.tolist() == [1, 2]
    assert data.n_classes == 3


def test_groups_train_on_their_own_and_hold_back_their_own() -> None:
    data = dataset(INPUTS, TARGETS, groups=["b", "a"] * 10, group_kind="user", seed=1)
    assert data.natural is not None
    assert (data.natural.kind, data.natural.names) == ("user", ("a", "b"))
    assert np.array_equal(np.sort(np.concatenate(data.natural.shards)), data.rows)
    assert np.array_equal(data.samples.take(np.concatenate(data.natural.holdouts)).inputs.sort(0)[0], data.test.inputs)
    for parity, *held in zip((1, 0), data.natural.shards, data.natural.holdouts, strict=True):
        assert set((np.concatenate(held) % 2).tolist()) == {parity}


def test_with_a_test_part_groups_hold_nothing_back() -> None:
    data = dataset(INPUTS, TARGETS, test=(INPUTS[:2], TARGETS[:2]), groups=["b", "a"] * 10)
    assert data.natural is not None
    assert [len(one) for one in data.natural.holdouts] == [0, 0]


class Squares(Dataset[tuple[Any, int]]):
    """Images as arrays, as a torchvision data set without a transform would give them."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return np.full((2, self.sizes[number]), number, dtype=np.float64), number % 2


def test_any_torch_data_set_with_a_length_will_do() -> None:
    data = from_torch(Squares([2] * 6), TensorDataset(torch.zeros(2, 2, 2), torch.tensor([1, 0])))
    assert data.samples.inputs[5].tolist() == [[5, 5], [5, 5]]
    assert data.samples.targets.tolist() == [0, 1, 0, 1, 0, 1]
    assert (data.input_shape, len(data.test)) == ((2, 2), 2)


class Endless(IterableDataset[tuple[Any, int]]):
    def __iter__(self) -> Iterator[tuple[Any, int]]:
        return repeat((0.0, 0))


@pytest.mark.parametrize(
    ("train", "why"),
    [
        (Squares([2, 3]), "same shape"),
        (Squares([]), "must not be empty"),
        (Endless(), "needs a length"),
        (TensorDataset(torch.zeros(3, 2)), "pair"),
    ],
)
def test_a_torch_data_set_of_something_else_is_refused(train: Dataset[Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        from_torch(train)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"targets": TARGETS[:-1]}, r"one target \(class\) for each of the inputs"),
        (
            {"targets": np.array([2**63, *TARGETS[1:]], np.uint64)},
            "up to 9223372036854775808, but they must be below 1000000; number the classes",
        ),
        ({"inputs": INPUTS[:, :0]}, r"there are no numbers in inputs: a size in the shape \(20, 0\) is 0"),
        ({"targets": [-1, *TARGETS[1:]]}, "whole numbers from 0 on"),
        ({"targets": [0.5] * 20}, "whole numbers from 0 on"),
        ({"targets": np.zeros((20, 2), dtype=np.int64)}, "one class for each input"),
        ({"targets": []}, "must not be empty"),
        ({"inputs": np.array(["text"] * 20)}, "must be numbers"),
        ({"inputs": np.array([np.zeros(1), np.zeros(2)] * 10, dtype=object)}, "must be numbers"),
        ({"inputs": 3.0}, r"one target \(class\) for each of the inputs"),
        ({"test": (INPUTS[:, :2], TARGETS)}, "give all inputs the same shape"),
        ({"test": (INPUTS, TARGETS[1:])}, r"one target \(class\) for each of the test inputs"),
        ({"groups": ["a"]}, "20 samples and 1 groups"),
        ({"n_classes": 3}, "n_classes must be at least 4"),
        ({"test_share": 1.0}, "smaller test_share"),
        ({"test_share": float("nan")}, "between 0 and 1, not nan"),
        ({"test_share": -0.1}, "between 0 and 1, not -0.1"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(bad: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        dataset(**dict[str, Any](inputs=INPUTS, targets=TARGETS) | bad)


def test_samples_stay_as_they_are() -> None:
    part = SampleSet(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
    data = from_samples(TrainAndTest(part, part), "ward")
    assert data.name == "ward"
    assert data.samples.inputs.data_ptr() == part.inputs.data_ptr()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_inputs_that_are_no_numbers_of_float32_are_refused(bad: float) -> None:
    inputs = INPUTS.copy()
    inputs[3, 1] = bad
    with pytest.raises(DataError, match="not all numbers of inputs are finite"):
        dataset(inputs, TARGETS)
    with pytest.raises(DataError, match="not all numbers of test inputs are finite"):
        dataset(INPUTS, TARGETS, test=(inputs, TARGETS))
