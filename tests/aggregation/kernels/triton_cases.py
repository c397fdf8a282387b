"""Every Triton kernel against the plain torch of the same name: equal bits. `test_triton_kernels.py` runs this, in a
process of its own, in Triton's interpreter; on a GPU, `UMBEL_TRITON_DEVICE=cuda python -m pytest` on this file does.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.aggregation.kernels.test_kernels import EXTREMES, LIMIT_ROTATED, equal_bits
from umbel.aggregation.kernels import kernels
from umbel.aggregation.kernels.arguments import Blocks, Levels, Quantizer
from umbel.aggregation.kernels.cuda import TritonKernels
from umbel.aggregation.kernels.native import Folded
from umbel.aggregation.kernels.packing import pack, packed_bytes
from umbel.aggregation.kernels.philox import dither, signs
from umbel.aggregation.kernels.quantize import quantize
from umbel.aggregation.kernels.rotation import rotate, unrotate
from umbel.aggregation.types import LEVEL_MAX

pytestmark = pytest.mark.slow  # most of it is the compiler
DEVICE = os.environ.get("UMBEL_TRITON_DEVICE", "cpu")
# Every side of a block (4 to 64), tiles that are full and not.
SIZES = st.sampled_from([0, 1, 127, 129, 600, 2047, 2048, 4095, 4097, 9000, 36_000])
KEYS = st.integers(0, (1 << 64) - 1)
WIDTHS = st.integers(1, 15)
GROUPS = st.one_of(st.integers(0, 50), st.integers(1 << 20, 1 << 33))
few = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.fixture(autouse=True)
def _by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the device: the interpreter works on the CPU."""
    monkeypatch.setattr(kernels, "_native", lambda *tensors: TritonKernels())  # pyright: ignore[reportUnknownLambdaType]


def vector(n_values: int, seed: int, limit: float = 3.4e38) -> Tensor:
    """Of all sizes, extreme ones among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n_values, generator=generator) * 10.0 ** (seed % 7 - 3)
    if n_values:
        places = torch.randint(0, n_values, (len(EXTREMES),), generator=generator)
        values[places] = EXTREMES.clamp(-limit, limit)
    return values


@st.composite
def quantizers(draw: st.DrawFn) -> Quantizer:
    inverse_step = torch.tensor(draw(st.floats(2.0**-100, 2.0**100, width=32))).item()
    if draw(st.booleans()):
        inverse_step = float(2 ** draw(st.integers(-6, 6)))
    cut = st.tuples(st.integers(-LEVEL_MAX, 0), st.integers(0, LEVEL_MAX), st.sampled_from([0, -32_768, 65_536]))
    levels = draw(st.one_of(st.just(Levels()), WIDTHS.map(Levels.of_width), cut.map(lambda parts: Levels(*parts))))
    return Quantizer(inverse_step, draw(KEYS), draw(st.integers(0, 65_535)), levels)


def quantized(values: Tensor, quantizer: Quantizer, first: int) -> Tensor:
    shared = dither(quantizer.key, first, values.numel())
    return quantize(values, quantizer.inverse_step, shared, quantizer.phi, quantizer.levels)


def empty(n_values: int, dtype: torch.dtype) -> Tensor:
    return torch.full((n_values,), 99, dtype=dtype, device=DEVICE)


@given(KEYS, GROUPS, SIZES)
@few
def test_dither_and_signs(key: int, group: int, n_values: int) -> None:
    shared, sign = empty(n_values, torch.int32), empty(n_values, torch.float32)
    kernels.dither_into(shared, key, group * 128)
    kernels.signs_into(sign, key, group * 2048)
    assert equal_bits(shared.cpu(), dither(key, group * 128, n_values))
    assert equal_bits(sign.cpu(), signs(key, group * 2048, n_values))


@given(SIZES, st.integers(0, 999), KEYS)
@few
def test_rotation(n_values: int, seed: int, key: int) -> None:
    """Whole, and in parts of a tile."""
    values, blocks = vector(n_values, seed, LIMIT_ROTATED), Blocks.of(n_values)
    expected = rotate(values, blocks, key)
    out, parts = empty(blocks.n_padded, torch.float32), empty(blocks.n_padded, torch.float32)
    kernels.rotate_into(out, values.to(DEVICE), blocks, key)
    for first in range(0, blocks.n_padded, kernels.TILE):
        kernels.rotate_into(parts[first : first + kernels.TILE], values.to(DEVICE), blocks, key, first)
    assert equal_bits(out.cpu(), expected)
    assert equal_bits(parts.cpu(), expected)


@given(SIZES, st.integers(0, 999), KEYS, st.sampled_from([torch.float32, torch.float64]))
@few
def test_the_inverse(n_values: int, seed: int, key: int, dtype: torch.dtype) -> None:
    blocks = Blocks.of(n_values)
    rotated = torch.randn(blocks.n_padded, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    out = empty(n_values, dtype)
    for first in range(0, blocks.n_padded, kernels.TILE):
        kernels.unrotate_into(out, rotated[first : first + kernels.TILE].to(DEVICE), blocks, key, first)
    assert equal_bits(out.cpu(), unrotate(rotated, blocks, key))


@given(SIZES, st.integers(0, 999), quantizers(), GROUPS, st.sampled_from([torch.int32, torch.int16]))
@few
def test_levels(n_values: int, seed: int, quantizer: Quantizer, group: int, dtype: torch.dtype) -> None:
    values, out = vector(n_values, seed), empty(n_values, dtype)
    kernels.quantize_into(out, values.to(DEVICE), quantizer, group * 128)
    assert equal_bits(out.cpu(), quantized(values, quantizer, group * 128).to(dtype))


def test_halves_of_a_step_are_rounded_to_even() -> None:
    """Of all halves around 2^22 and 2^23, where float32 loses them."""
    halves = torch.cat([torch.arange(-600, 600) / 2 + place for place in (0, 1 << 21, 1 << 22, 1 << 23, -(1 << 22))])
    values = halves.to(torch.float32) / (1 << 16)
    out = empty(values.numel(), torch.int32)
    quantizer = Quantizer(1.0, 3, 5, Levels())
    kernels.quantize_into(out, values.to(DEVICE), quantizer)
    assert torch.equal(out.cpu(), quantized(values, quantizer, 0))


@given(SIZES, st.integers(0, 999), quantizers(), GROUPS, WIDTHS)
@few
def test_packed_levels(n_values: int, seed: int, quantizer: Quantizer, group: int, bits: int) -> None:
    values, out = vector(n_values, seed), empty(packed_bytes(n_values, bits), torch.uint8)
    kernels.pack_into(out, values.to(DEVICE), quantizer, bits, group * 512)
    assert torch.equal(out.cpu(), pack(quantized(values, quantizer, group * 512), bits))


@given(SIZES, st.integers(0, 999), KEYS, quantizers(), WIDTHS)
@few
def test_rotated_and_packed_at_once(n_values: int, seed: int, key: int, quantizer: Quantizer, bits: int) -> None:
    values, blocks = vector(n_values, seed, LIMIT_ROTATED), Blocks.of(n_values)
    expected = pack(quantized(rotate(values, blocks, key), quantizer, 0), bits)
    out = empty(expected.numel(), torch.uint8)
    for first in range(0, blocks.n_padded, kernels.TILE):
        n = min(kernels.TILE, blocks.n_padded - first)
        place = slice(packed_bytes(first, bits), packed_bytes(first + n, bits))
        kernels.rotate_and_pack_into(out[place], values.to(DEVICE), blocks, key, quantizer, bits, (first, n))
    assert torch.equal(out.cpu(), expected)


@given(
    SIZES,
    WIDTHS,
    st.integers(-(1 << 31), (1 << 31) - 1),
    st.sampled_from([torch.int32, torch.int64]),
    st.integers(0, 9),
)
@few
def test_folding(n_values: int, bits: int, weight: int, dtype: torch.dtype, seed: int) -> None:
    generator, bound = torch.Generator().manual_seed(seed), 1 << (bits - 1)
    levels = torch.randint(-bound, bound, (n_values,), generator=generator, dtype=torch.int32)
    before = torch.randint(-(1 << 30), 1 << 30, (n_values,), generator=generator, dtype=torch.int64)
    sums = before.clone().to(dtype).to(DEVICE)
    folded = kernels.fold_packed(sums, pack(levels, bits).to(DEVICE), bits, weight)
    assert torch.equal(sums.cpu(), (before + levels.to(torch.int64) * weight).to(dtype))
    squares, greatest = int(levels.to(torch.int64).square().sum()), int(levels.abs().max()) if n_values else 0
    assert folded == Folded(squares, greatest)
