"""Residues of every width on every path: packed as packing.py says, and added as its integers, modulo 2^32."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from umbel.aggregation.kernels import native
from umbel.aggregation.kernels.kernels import add_packed, pack_residues, pack_residues_into
from umbel.aggregation.kernels.packing import pack, packed_bytes, unpack

WIDTHS = st.integers(1, 32)
SIZES = st.one_of(st.integers(0, 9000), st.sampled_from([0, 1, 15, 16, 17, 511, 512, 513, 4096, 65_536, 65_537]))
LANES = {8: torch.int8, 16: torch.int16, 32: torch.int32}
each_path = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def whole_range(n_values: int, seed: int) -> Tensor:
    """int32, all of whose bits are drawn."""
    return torch.from_numpy(np.random.default_rng(seed).integers(-(1 << 31), 1 << 31, n_values, np.int32))


@given(SIZES, WIDTHS, st.integers(0, 999))
@each_path
def test_residues_are_packed_as_torch_packs_them(path: native.Path, n_values: int, bits: int, seed: int) -> None:
    residues = whole_range(n_values, seed)
    packed = pack_residues(residues, bits)
    assert torch.equal(packed, pack(residues, bits))
    assert packed.numel() == packed_bytes(n_values, bits)


@given(SIZES, WIDTHS, st.integers(0, 999))
@each_path
def test_what_was_packed_is_added_as_torch_unpacks_it(path: native.Path, n_values: int, bits: int, seed: int) -> None:
    """To sums of the whole range: some wrap at 32 bits."""
    sums, packed = whole_range(n_values, seed + 1), pack(whole_range(n_values, seed), bits)
    expected = sums + unpack(packed, n_values, bits)
    add_packed(sums, packed, bits)
    assert torch.equal(sums, expected)


@pytest.mark.parametrize("bits", range(1, 33))
def test_every_width_adds_up_modulo_its_power_of_two(path: native.Path, bits: int) -> None:
    """Against sums in 64 bits."""
    vectors = [whole_range(1300, seed) for seed in range(5)]
    sums = torch.zeros(1300, dtype=torch.int32)
    for residues in vectors:
        add_packed(sums, pack_residues(residues, bits), bits)
    expected = torch.stack(vectors).sum(0, dtype=torch.int64)
    assert not ((sums.to(torch.int64) - expected) % (1 << bits)).any()


@pytest.mark.parametrize("bits", range(1, 33))
@pytest.mark.parametrize("value", [0, -1, (1 << 31) - 1, -(1 << 31)])
def test_extreme_integers_are_packed_and_added(path: native.Path, bits: int, value: int) -> None:
    residues = torch.full((600,), value, dtype=torch.int32)
    sums, packed = torch.full((600,), (1 << 31) - 1, dtype=torch.int32), pack_residues(residues, bits)
    expected = sums + unpack(pack(residues, bits), 600, bits)
    add_packed(sums, packed, bits)
    assert torch.equal(packed, pack(residues, bits))
    assert torch.equal(sums, expected)


@pytest.mark.parametrize("width", [8, 16])
def test_narrow_lanes_are_packed_as_wide_ones(path: native.Path, width: int) -> None:
    narrow = whole_range(1000, 1).to(LANES[width])
    for bits in range(1, width + 1):
        assert torch.equal(pack_residues(narrow, bits), pack(narrow.to(torch.int32), bits))


def test_tensors_that_are_not_contiguous_are_taken(path: native.Path) -> None:
    residues, sums = whole_range(2000, 1)[::2], torch.zeros(2000, dtype=torch.int32)
    for bits in (7, 20):
        packed = pack_residues(residues, bits)
        assert torch.equal(packed, pack(residues, bits))
        sums.zero_()
        add_packed(sums[::2], packed, bits)
        assert torch.equal(sums[::2], unpack(packed, 1000, bits))
        assert not sums[1::2].any()


@pytest.mark.parametrize("n_values", [1, 511, 512, 513, 1500])
@pytest.mark.parametrize("bits", [1, 8, 17, 31, 32])
def test_what_lies_beside_the_buffers_is_left_alone(path: native.Path, n_values: int, bits: int) -> None:
    """Buffers in the middle of larger ones, at odd places."""
    n_bytes = packed_bytes(n_values, bits)
    out, sums = torch.full((n_bytes + 2,), 7, dtype=torch.uint8), torch.full((n_values + 2,), 7, dtype=torch.int32)
    residues = whole_range(n_values + 1, 1)[1:]
    pack_residues_into(out[1:-1], residues, bits)
    add_packed(sums[1:-1], out[1:-1], bits)
    assert torch.equal(out[1:-1], pack(residues, bits))
    assert torch.equal(sums[1:-1], unpack(pack(residues, bits), n_values, bits) + 7)
    assert out[[0, -1]].tolist() == [7, 7]
    assert sums[[0, -1]].tolist() == [7, 7]


@pytest.mark.parametrize("bits", [0, 33, -1])
def test_widths_that_words_have_not_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"bits must lie between 1 and 32, not {bits}"):
        pack_residues_into(torch.zeros(64, dtype=torch.uint8), whole_range(10, 1), bits)
    with pytest.raises(ValueError, match=f"bits must lie between 1 and 32, not {bits}"):
        add_packed(whole_range(10, 1), torch.zeros(64, dtype=torch.uint8), bits)


def test_buffers_of_a_wrong_length_or_type_are_refused() -> None:
    residues, packed = whole_range(600, 1), torch.zeros(128 * 20, dtype=torch.uint8)
    for wrong in (packed[1:], packed.view(2, -1)):
        with pytest.raises(ValueError, match=r"the vector must have shape \[2560\]"):
            pack_residues_into(wrong, residues, 20)
        with pytest.raises(ValueError, match=r"the vector must have shape \[2560\]"):
            add_packed(residues, wrong, 20)
    with pytest.raises(ValueError, match=r"the vector must have shape \[600\]"):
        pack_residues(residues.view(2, 300), 20)
    with pytest.raises(ValueError, match=r"the vector must have shape \[600\]"):
        add_packed(residues.view(2, 300), packed, 20)
    with pytest.raises(TypeError, match=r"torch\.int32, not torch\.int64"):
        pack_residues(residues.to(torch.int64), 20)
    with pytest.raises(TypeError, match=r"type must be torch\.int32, not torch\.int16"):
        add_packed(residues.to(torch.int16), packed, 20)
    with pytest.raises(TypeError, match=r"type must be torch\.uint8, not torch\.int8"):
        add_packed(residues, packed.to(torch.int8), 20)


@pytest.mark.parametrize("width", [8, 16])
def test_lanes_narrower_than_what_is_packed_are_refused(width: int) -> None:
    """What would be packed above them is no residue."""
    with pytest.raises(ValueError, match=f"int{width} is too narrow for {width + 1} bits"):
        pack_residues(torch.zeros(10, dtype=LANES[width]), width + 1)
