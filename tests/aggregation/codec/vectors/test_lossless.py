"""Planes of bytes: float32 to the bit, bfloat16 as torch rounds it; sizes; what is no update refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.aggregation.codec.cases import context_of, decoded, gaussian, heavy, passed, payload_of
from umbel.aggregation.codec.entropy.frame import compress
from umbel.aggregation.codec.entropy.payload import Precision
from umbel.aggregation.codec.vectors.codec import CHUNK_VALUES
from umbel.aggregation.codec.vectors.lossless import Planes
from umbel.aggregation.errors import LyingLength, NonFiniteUpdate

FLOATS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=60)


def bits_of(values: torch.Tensor) -> list[int]:
    bits: list[int] = values.view(torch.int32).tolist()
    return bits


@given(FLOATS)
def test_every_bit_comes_back(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    assert bits_of(passed(Planes(), values, context_of(len(numbers)))) == bits_of(values)


@given(FLOATS)
def test_half_precision_is_rounded_as_torch_rounds_but_never_to_infinity(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    most = torch.finfo(torch.bfloat16).max
    expected = values.to(torch.bfloat16).to(torch.float32).clamp(-most, most)
    assert bits_of(passed(Planes(Precision.BFLOAT16), values, context_of(len(numbers)))) == bits_of(expected)


def test_several_chunks_come_back() -> None:
    values = gaussian(2 * CHUNK_VALUES + 1)
    assert torch.equal(passed(Planes(), values, context_of(values.numel())), values)


@pytest.mark.parametrize(("precision", "bits"), [(Precision.FLOAT32, 27.0), (Precision.BFLOAT16, 11.0)])
def test_gaussian_values_take_so_many_bits(precision: Precision, bits: float) -> None:
    payload = payload_of(Planes(precision), gaussian(1 << 18), context_of(1 << 18))
    assert len(payload) * 8 / (1 << 18) < bits


def test_planes_are_shorter_than_the_numbers_as_they_are() -> None:
    values = heavy(1 << 16)
    plain = b"".join(compress([values.numpy().tobytes()], 4 << 16))
    assert len(payload_of(Planes(), values, context_of(1 << 16))) < 0.97 * len(plain)


def test_a_change_of_few_coordinates_takes_few_bytes() -> None:
    values = torch.where(gaussian(1 << 16, 1) > 2.3, gaussian(1 << 16), 0.0)  # about one in a hundred
    assert len(payload_of(Planes(), values, context_of(1 << 16))) * 8 / (1 << 16) < 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("precision", Precision)
def test_what_is_not_finite_is_refused(value: float, precision: Precision) -> None:
    written = torch.tensor([value]).to(getattr(torch, precision.value)).view(torch.uint8)
    with pytest.raises(NonFiniteUpdate):
        decoded(Planes(precision), compress([written.numpy().tobytes()], precision.n_bytes), context_of(1))


def test_a_frame_that_says_another_length_is_refused() -> None:
    with pytest.raises(LyingLength, match="must state 40 bytes"):
        decoded(Planes(), compress([bytes(1 << 20)], 1 << 20), context_of(10))
