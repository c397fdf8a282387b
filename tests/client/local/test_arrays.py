"""Named numpy arrays as a model and as data: every dtype and name comes back, and a misfit is refused by its name."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from umbel.aggregation.model.layout import DTYPES, Layout
from umbel.client import ArrayData, ArrayModel, LocalPlan

NAMES = st.text(st.sampled_from("aw.:/ é"), min_size=1, max_size=6) | st.sampled_from(
    ["type", "training", "put", "_put", "_buffers", "bn.running_mean", "a", "a.b", ".", "a..b"]
)
NUMPY_DTYPES = sorted(DTYPES - {"bfloat16"})
ARRAYS = hnp.arrays(st.sampled_from(NUMPY_DTYPES), hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3))


def plain(arrays: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (str(one.dtype), one.shape, one.tobytes()) for name, one in arrays.items()}


@given(st.dictionaries(NAMES, ARRAYS, max_size=3))
def test_a_model_of_arrays_gives_them_back_and_loads_its_own_state(arrays: dict[str, Any]) -> None:
    model = ArrayModel(arrays)
    assert plain(model.arrays()) == plain(arrays)
    assert {name: str(one.dtype).removeprefix("torch.") for name, one in model.state_dict().items()} == {
        name: str(one.dtype) for name, one in arrays.items()
    }
    other = ArrayModel({name: np.zeros_like(one) for name, one in arrays.items()})
    other.load_state_dict(model.state_dict())
    assert plain(other.arrays()) == plain(arrays)
    assert sorted(spec.name for spec in Layout.of_state(model.state_dict()).tensors) == sorted(arrays)


def test_copies_of_a_model_of_arrays_have_its_arrays() -> None:
    arrays: dict[str, Any] = {"type": np.ones(2, np.float16), "a": np.zeros(()), "a.b": np.array([True])}
    model = ArrayModel(arrays)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert plain(copied.arrays()) == plain(arrays)


def test_arrays_of_other_memory_orders_and_byte_orders_are_taken_by_their_values() -> None:
    values = np.arange(6.0).reshape(2, 3)
    frozen = values.copy()
    frozen.flags.writeable = False
    model = ArrayModel({"f": np.asfortranarray(values), "big": values.astype(">f8"), "view": values[::-1], "r": frozen})
    assert [one.tolist() for one in model.arrays().values()] == [
        values.tolist(),
        values.tolist(),
        values[::-1].tolist(),
        values.tolist(),
    ]


def test_arrays_that_a_model_gives_and_takes_are_copies() -> None:
    given_first = np.zeros(2)
    model = ArrayModel({"w": given_first})
    given_first += 1
    model.arrays()["w"] += 2
    new = np.full(2, 3.0)
    model.set_arrays({"w": new})
    new += 1
    assert model.arrays()["w"].tolist() == [3.0, 3.0]


def test_floating_point_arrays_are_trainable_and_statistics_and_integers_are_not() -> None:
    arrays = {"w": np.ones(2), "bn.running_mean": np.ones(2), "steps": np.ones(1, np.int64), "mask": np.array([True])}
    assert [name for name, _ in ArrayModel(arrays).named_parameters()] == ["w"]


@pytest.mark.parametrize("value", [np.array(["text"]), np.array([1j]), np.array([None]), np.zeros(2, np.uint32)])
def test_a_dtype_that_has_no_mean_is_refused_with_the_arrays_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"array 'w' has dtype .*, which cannot be averaged: convert it"):
        ArrayModel({"w": value})


@pytest.mark.parametrize("name", ["", 3])
def test_a_name_that_is_no_text_is_refused(name: Any) -> None:
    with pytest.raises(TypeError, match="the name of an array must be a text"):
        ArrayModel({name: np.zeros(1)})


MISFITS: list[tuple[dict[str, Any], str]] = [
    ({}, r"array 'w' is missing, which the model has with the shape float32\[2, 1\]"),
    ({"w": np.ones((2, 1), np.float32), "n": 1, "v": 2}, "array 'v' is not one of the model's: w, n"),
    (
        {"w": np.ones(2, np.float32), "n": 1},
        r"array 'w' has the shape float32\[2\], but the model's has float32\[2, 1\]",
    ),
    ({"w": np.ones((2, 1)), "n": 1}, r"array 'w' has the shape float64\[2, 1\], but the model's has float32\[2, 1\]"),
    (
        {"w": np.array([[1], [np.nan]], np.float32), "n": 1},
        r"array 'w' with the shape float32\[2, 1\] holds a NaN or an infinity",
    ),
    ({"w": np.full((2, 1), np.inf, np.float32), "n": 1}, "array 'w' .* holds a NaN or an infinity"),
]


@pytest.mark.parametrize(("arrays", "sentence"), MISFITS)
def test_arrays_that_do_not_fit_are_refused_and_change_nothing(arrays: dict[str, Any], sentence: str) -> None:
    model = ArrayModel({"w": np.zeros((2, 1), np.float32), "n": np.array(0)})
    with pytest.raises(ValueError, match=sentence):
        model.set_arrays({"n": 1, **arrays} if arrays else {"n": 1})
    assert [one.tolist() for one in model.arrays().values()] == [[[0.0], [0.0]], 0]


class OneByOne(ArrayData):
    """Samples that a site could augment."""

    def __getitem__(self, chosen: Any) -> tuple[Any, ...]:
        assert isinstance(chosen, int)
        return super().__getitem__(chosen)


@pytest.mark.parametrize("kind", [ArrayData, OneByOne])
def test_a_data_set_of_arrays_gives_batches_of_arrays_in_the_order_of_tensors(kind: type[ArrayData]) -> None:
    features, labels = np.arange(20.0).reshape(10, 2), np.arange(10)
    plan = LocalPlan(epochs=2, batch_size=4, seed=5)
    found = list(plan.drive(kind(features, labels)))
    tensors = torch.utils.data.TensorDataset(torch.from_numpy(features), torch.from_numpy(labels))
    expected = list(plan.drive(tensors))
    assert len(found) == len(expected) == 6
    for batch, other in zip(found, expected, strict=True):
        assert all(isinstance(one, np.ndarray) for one in batch)
        assert [one.dtype for one in batch] == [np.float64, np.int64]
        assert [one.tolist() for one in batch] == [one.tolist() for one in other]


def test_means_over_batches_of_arrays_are_weighed_by_their_samples() -> None:
    steps = LocalPlan(epochs=1, batch_size=4).drive(ArrayData(np.arange(10)))
    for (values,) in steps:
        steps.note(mean=float(values.mean()))
    assert steps.result(10).metrics["mean"] == pytest.approx(4.5)


@pytest.mark.parametrize("arrays", [(), (np.zeros(3), np.zeros(4)), (np.float64(1),)])
def test_arrays_without_a_common_length_are_no_data_set(arrays: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="give at least one array, and all with the same first dimension"):
        ArrayData(*arrays)
