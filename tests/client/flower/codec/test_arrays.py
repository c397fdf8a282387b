"""Flower's arrays and a change between them make the trained arrays, with the names, shapes and dtypes that came."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as draw

pytest.importorskip("flwr", reason="flwr is in the environment of the Flower tests only (make test)")

from tests.client.flower.codec.messages import Arrays, arrays_in, record_of
from umbel.aggregation.codec.one_update import read_one
from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.errors import LayoutError, ModelOverflow
from umbel.aggregation.plans.codec import CodecPlan, Grid
from umbel.client.flower.codec.arrays import FirstDtypes, StartArrays

GRID = Grid.finest(max_abs=64.0, total_weight_max=1)
RANGES: dict[str, Any] = {
    "float64": st.floats(-30, 30, width=32),  # the change travels as float32
    "float32": st.floats(-30, 30, width=32),
    "float16": st.floats(-30, 30, width=16),
    "int64": st.integers(-1000, 1000),
    "int32": st.integers(-1000, 1000),
    "int16": st.integers(-1000, 1000),
    "uint8": st.integers(0, 255),
    "int8": st.integers(-128, 127),
    "bool": st.booleans(),
}


@st.composite
def pairs(drawn: st.DrawFn) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """An array before and after a training."""
    dtype = drawn(st.sampled_from(sorted(RANGES)))
    shape = drawn(draw.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=5))
    before, after = (drawn(draw.arrays(dtype, shape, elements=RANGES[dtype])) for _ in range(2))
    return before, after


def passed(start: Arrays, local: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Through the codec that rounds nothing."""
    arrays = StartArrays.of(record_of(start))
    codec = codec_for(CodecPlan(), GRID, arrays.layout)
    update = b"".join(bytes(one) for one in codec.encode(lambda: arrays.changes(record_of(local)), 0))
    return arrays_in(arrays.moved(read_one(codec, update, 0).change))


@pytest.mark.slow
@given(model=st.dictionaries(st.text(min_size=1, max_size=5), pairs(), max_size=4))
def test_any_model_comes_back_with_its_names_shapes_dtypes_and_values(
    model: dict[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]],
) -> None:
    local = {name: after for name, (_, after) in model.items()}
    found = passed({name: before for name, (before, _) in model.items()}, local)
    assert [*found] == [*local]
    for name, one in local.items():
        assert (found[name].dtype, found[name].shape) == (one.dtype, one.shape)
        np.testing.assert_allclose(found[name].astype(float), one.astype(float), rtol=1e-6, atol=1e-6)


def test_both_names_of_a_tied_tensor_get_its_values() -> None:
    one, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    other.weight = one.weight
    model = torch.nn.ModuleDict({"a": one, "b": other})
    before = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    with torch.no_grad():
        one.weight += 1
    after = {name: value.numpy() for name, value in model.state_dict().items()}
    found = passed(before, after)
    assert np.allclose(found["a.weight"], before["a.weight"] + 1)
    assert np.array_equal(found["a.weight"], found["b.weight"])


def test_a_record_that_an_app_empties_is_still_known() -> None:
    record = record_of({"w": np.zeros(2, dtype=np.float32)})
    arrays = StartArrays.of(record)
    record.clear()
    (change,) = arrays.changes(record_of({"w": np.ones(2, dtype=np.float32)}))
    assert change.tolist() == [1.0, 1.0]


def test_an_array_may_come_back_in_a_dtype_that_fits() -> None:
    start: Arrays = {"w": np.ones(2, dtype=np.float32), "n": np.array(1, dtype=np.int64)}
    found = passed(start, {"w": np.full(2, 2.5), "n": np.array(9, dtype=np.int32)})
    assert (found["w"].dtype.name, found["w"].tolist()) == ("float32", [2.5, 2.5])
    assert (found["n"].dtype.name, int(found["n"])) == ("int64", 9)


@pytest.mark.parametrize(
    ("local", "words"),
    [
        ({"n": np.zeros((), np.int64)}, "array 'w' is missing in the reply of the training"),
        (
            {"w": np.zeros(2, np.float32), "n": np.zeros((), np.int64), "x": np.zeros(1)},
            "array 'x' of the reply of the training was not in the message",
        ),
        (
            {"w": np.zeros((2, 1), np.float32), "n": np.zeros((), np.int64)},
            r"array 'w' came with the shape \[2\], and the training returned \[2, 1\]",
        ),
        (
            {"w": np.zeros(2, np.int32), "n": np.zeros((), np.int64)},
            "array 'w' came as float32, and the training returned int32, which a codec must not round",
        ),
        (
            {"w": np.zeros(2, np.float32), "n": np.zeros((), np.float64)},
            "array 'n' came as int64, and the training returned float64: return it in the dtype in which it came",
        ),
        ({"w": np.zeros(2, np.float32), "n": np.array(1 << 40)}, "integer tensor 'n' changed by more than"),
    ],
)
def test_another_model_is_refused_with_its_name(local: Arrays, words: str) -> None:
    start = StartArrays.of(record_of({"w": np.zeros(2, np.float32), "n": np.zeros((), np.int64)}))
    with pytest.raises(LayoutError, match=words):
        [*start.changes(record_of(local))]


def test_a_dtype_that_no_model_has_is_named() -> None:
    with pytest.raises(ValueError, match="array 'w' has dtype complex64, which cannot be averaged"):
        _ = StartArrays.of(record_of({"w": np.zeros(2, dtype=np.complex64)})).layout


def test_a_change_beyond_the_dtypes_range_is_refused() -> None:
    start = {"w": np.full(2, 3.4e38, dtype=np.float32)}
    arrays = StartArrays.of(record_of(start))

    class Far:
        def mean_slice(self, start: int, stop: int) -> torch.Tensor:
            return torch.full((stop - start,), 1e38, dtype=torch.float64)

    with pytest.raises(ModelOverflow):
        arrays.moved(Far())


def test_arrays_keep_the_dtypes_of_the_first_round() -> None:
    """Flower's mean of an integer is a float64."""
    first: Arrays = {
        "w": np.zeros(2, np.float32),
        "n": np.array([0, 1], np.int64),
        "b": np.zeros(3, np.bool_),
        "u": np.zeros(3, np.uint8),
    }
    dtypes, record = FirstDtypes(), record_of(first)
    assert dtypes.kept(record) is record
    later = dtypes.kept(
        record_of(
            {
                "w": np.array([0.5, 1e300]),
                "n": np.array([7.9999999, 1e30]),
                "b": np.array([0.2, 0.5, 1.0]),
                "u": np.array([-3.0, 1.4, 1e9]),
                "new": np.zeros(1, np.float16),
            }
        )
    )
    found = arrays_in(later)
    assert {name: one.dtype for name, one in found.items() if name in first} == {n: a.dtype for n, a in first.items()}
    assert found["w"].tolist() == [0.5, float(np.finfo(np.float32).max)]
    assert found["n"].tolist() == [8, 2**63 - 1024]
    assert found["b"].tolist() == [False, True, True]
    assert found["u"].tolist() == [0, 1, 255]
    assert dtypes.kept(later) is later


def test_a_mean_that_is_not_finite_is_no_integer() -> None:
    dtypes = FirstDtypes()
    dtypes.kept(record_of({"n": np.array(1)}))
    with pytest.raises(ValueError, match="array 'n' was int64 in the first round, and now has a value that is not"):
        dtypes.kept(record_of({"n": np.array(np.nan)}))
