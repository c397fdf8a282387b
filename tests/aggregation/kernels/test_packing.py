"""Fixed widths: nothing is lost, and the bits stand where the format says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.kernels.packing import GROUP, pack, packed_bytes, unpack


@given(st.integers(1, 32), st.integers(0, 1200), st.integers(0, 1 << 30))
def test_what_was_packed_comes_back(bits: int, n_values: int, seed: int) -> None:
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    draw = torch.Generator().manual_seed(seed)
    levels = torch.randint(low, high + 1, (n_values,), generator=draw, dtype=torch.int64).to(torch.int32)
    data = pack(levels, bits)
    assert data.numel() == packed_bytes(n_values, bits)
    assert torch.equal(unpack(data, n_values, bits), levels)


@given(st.integers(1, 31), st.integers(0, GROUP - 1), st.data())
def test_each_value_stands_in_its_lane(bits: int, place: int, data: st.DataObject) -> None:
    """The whole group as 16 little numbers: lane by lane, value by value, from the lowest bit up."""
    value = data.draw(st.integers(1, (1 << bits) - 1))
    levels = torch.zeros(GROUP, dtype=torch.int32)
    levels[place] = value
    packed = bytes(pack(levels, bits).tolist())
    row, lane = divmod(place, 16)
    words = [int.from_bytes(packed[4 * i : 4 * i + 4], "little") for i in range(16 * bits)]
    number = sum(words[16 * w + lane] << (32 * w) for w in range(bits))
    assert number == value << (row * bits)
    assert sum(words) == sum(words[16 * w + lane] for w in range(bits))


def test_too_few_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="take 256 bytes, not 255"):
        unpack(torch.zeros(255, dtype=torch.uint8), 100, 4)
