"""Models as safetensors bytes: ours, foreign ones, hostile ones."""

import contextlib
import hashlib
import json

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.artifact import LAYOUT_KEY, decode_model, encode_model, layout_of, metadata_of
from umbel.aggregation.model.layout import Layout


def model() -> dict[str, Tensor]:
    weight = torch.arange(6.0).view(2, 3)
    return {
        "embedding": weight,
        "head": weight,
        "bias": torch.tensor([0.5, -0.5], dtype=torch.bfloat16),
        "steps": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
    }


MODEL = encode_model(model())


def file_with(header: object, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def test_a_model_comes_back_with_its_ties_shapes_and_dtypes() -> None:
    layout, state = decode_model(MODEL)
    assert layout == Layout.of_state(model())
    assert layout == Layout.of_state(state)
    assert state["head"] is state["embedding"]
    for name, tensor in model().items():
        assert state[name].dtype == tensor.dtype
        assert torch.equal(state[name], tensor)


def test_the_same_state_gives_the_same_bytes() -> None:
    turned = dict(reversed(model().items()))
    assert encode_model(turned) == MODEL == encode_model(decode_model(MODEL)[1])


def test_the_bytes_of_a_small_model_never_change() -> None:
    data = encode_model({"w": torch.tensor([[1.0], [2.0]]), "n": torch.tensor(3)})
    assert hashlib.sha256(data).hexdigest() == "4c0f6e439dcc269c0842288abbba63b7a02ae3f9f23df342a540a9a178d8a3be"


def test_what_lies_askew_is_written_straight() -> None:
    askew = {"x": torch.arange(6.0).view(2, 3).t()}
    assert encode_model(askew) == encode_model({"x": askew["x"].contiguous()})


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_file_from_elsewhere_is_laid_out_from_its_tensors(metadata: dict[str, str] | None) -> None:
    state = {"b": torch.zeros(2), "a": torch.ones(3, dtype=torch.float16)}
    layout, read = decode_model(safetensors.torch.save(state, metadata))
    assert layout == Layout.of_state(state)
    assert torch.equal(read["a"], state["a"])


@pytest.mark.parametrize(
    "lie",
    [
        {"x": torch.zeros(3)},
        {"x": torch.zeros(2, 1)},
        {"x": torch.zeros(2).half()},
        {"y": torch.zeros(2)},
        {"x": torch.zeros(2), "y": torch.zeros(2)},
        {},
    ],
)
def test_metadata_that_does_not_describe_the_tensors_is_refused(lie: dict[str, Tensor]) -> None:
    state = {"x": torch.zeros(2)}
    with pytest.raises(LayoutError, match="does not describe its tensors"):
        decode_model(safetensors.torch.save(state, metadata_of(Layout.of_state(lie))))
    with pytest.raises(LayoutError, match="does not describe its tensors"):
        layout_of(metadata_of(Layout.of_state(lie)), state)


@pytest.mark.parametrize("text", ["", "[", "[[]]", "[" * 50_000, '[["x",[2],"float32",0,"x"]]'])
def test_metadata_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="invalid layout"):
        decode_model(safetensors.torch.save({"x": torch.zeros(2)}, {LAYOUT_KEY: text}))


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, len(MODEL) // 2, len(MODEL) - 1])
def test_a_file_cut_short_is_refused(length: int) -> None:
    with pytest.raises(LayoutError, match="not a safetensors model"):
        decode_model(MODEL[:length])


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 64,
        file_with([]),
        file_with({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"\0" * 4),
        file_with({"x": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 4]}}, b"\0" * 4),
        file_with({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"\0" * 4),
        file_with({"x": {"dtype": "NO", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4),
        file_with({"__metadata__": {LAYOUT_KEY: 5}}),
    ],
)
def test_a_file_that_lies_about_itself_is_refused(data: bytes) -> None:
    with pytest.raises(LayoutError):
        decode_model(data)


@pytest.mark.parametrize(
    ("dtype", "size"), [("C64", 8), ("F8_E4M3", 1), ("F8_E5M2", 1), ("F8_E8M0", 1), ("F4", 1), ("U64", 8)]
)
def test_dtypes_without_a_mean_are_refused(dtype: str, size: int) -> None:
    n_values = 2 if dtype == "F4" else 1
    entry = {"dtype": dtype, "shape": [n_values], "data_offsets": [0, size]}
    with pytest.raises(LayoutError):
        decode_model(file_with({"x": entry}, b"\0" * size))


@given(
    st.binary(max_size=200)
    | st.tuples(st.binary(max_size=80), st.binary(max_size=8)).map(
        lambda parts: len(parts[0]).to_bytes(8, "little") + parts[0] + parts[1]
    )
)
def test_random_bytes_are_a_layout_error(data: bytes) -> None:
    with contextlib.suppress(LayoutError):
        decode_model(data)


@given(st.integers(0, len(MODEL) - 1), st.integers(1, 255))
def test_a_model_with_one_byte_changed_is_a_model_or_a_layout_error(at: int, flip: int) -> None:
    data = bytearray(MODEL)
    data[at] ^= flip
    try:
        layout, state = decode_model(bytes(data))
    except LayoutError:
        return
    assert {spec.name for spec in layout.tensors} == set(state)
