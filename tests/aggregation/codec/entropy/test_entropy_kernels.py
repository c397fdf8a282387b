"""The compiled kernels of entropy coding on every path that this machine has, against torch: equal integers."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from umbel.aggregation.codec.entropy import entropy_kernels as kernels
from umbel.aggregation.codec.entropy.entropy_kernels import MIRRORED, N_CLASSES, N_QUARTERS, WIDTHS, packed_bytes
from umbel.aggregation.kernels import native
from umbel.aggregation.kernels.kernels import add_levels
from umbel.aggregation.types import LEVEL_MAX

Made = TypeVar("Made")
SIZES = st.one_of(st.integers(0, 9000), st.sampled_from([0, 1, 2, 3, 4, 5, 511, 512, 2047, 2048, 2049, 2053]))
SEEDS = st.integers(0, 1000)
each_path = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def by_torch(what: Callable[[], Made]) -> Made:
    """The same by torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "compiled_for", lambda *_: None)
        return what()


def levels_of(n_values: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    levels = (torch.randn(n_values, generator=draw) * 10.0 ** (seed % 4 - 1)).round().to(torch.int32)
    if n_values > 2:
        levels[[0, -1]] = torch.tensor([LEVEL_MAX, -LEVEL_MAX], dtype=torch.int32)
    return levels


def classes_of(n_values: int, seed: int) -> Tensor:
    """Of a few kinds or of all."""
    draw = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, 256, (n_values,), generator=draw, dtype=torch.uint8)
    return classes & (MIRRORED | (N_CLASSES - 1 if seed % 2 else 3))


@pytest.mark.usefixtures("path")
@each_path
@given(SIZES, SEEDS, st.integers(0, (1 << 64) - 1), st.integers(0, 65_535), st.integers(0, 1 << 40))
def test_class_bytes_are_those_of_torch(n_values: int, seed: int, key: int, phi: int, group: int) -> None:
    energies = classes_of(n_values, seed) & 15
    found = energies.clone()
    kernels.mix_dither_into(found, key, phi, 128 * group)
    by_torch(lambda: kernels.mix_dither_into(energies, key, phi, 128 * group))
    assert torch.equal(found, energies)


@pytest.mark.usefixtures("path")
@each_path
@given(SIZES, SEEDS)
def test_levels_by_class_and_back_are_those_of_torch(n_values: int, seed: int) -> None:
    levels, classes = levels_of(n_values, seed), classes_of(n_values, seed)
    counted, expected = kernels.count(classes), by_torch(lambda: kernels.count(classes))
    assert torch.equal(counted.counts, expected.counts)
    assert counted.counts.shape == (N_QUARTERS, N_CLASSES)
    folded = kernels.by_class(levels, counted)
    assert torch.equal(folded, by_torch(lambda: kernels.by_class(levels, expected)))
    assert torch.equal(kernels.in_place(folded, counted), levels)
    assert torch.equal(by_torch(lambda: kernels.in_place(folded, counted)), levels)


@pytest.mark.usefixtures("path")
@each_path
@given(SIZES, SEEDS, st.sampled_from(WIDTHS))
def test_symbols_are_those_of_torch_and_come_back(n_values: int, seed: int, width: int) -> None:
    folded = levels_of(n_values, seed).to(torch.int16)
    packed, excesses = kernels.pack_symbols(folded, width)
    expected, expected_excesses = by_torch(lambda: kernels.pack_symbols(folded, width))
    assert torch.equal(packed, expected)
    assert torch.equal(excesses, expected_excesses)
    back = torch.empty_like(folded)
    made = kernels.unpack_symbols(back, packed, width, excesses.clone())
    assert torch.equal(back, folded)
    assert (made.n_escapes, made.is_within, made.is_filled_with_zeros) == (excesses.numel(), True, True)


@pytest.mark.usefixtures("path")
@each_path
@given(st.integers(0, 1200), st.integers(0, 1500), SEEDS, st.sampled_from(WIDTHS))
def test_any_bytes_are_read_as_torch_reads_them(n_values: int, n_excesses: int, seed: int, width: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (packed_bytes(n_values, width),), generator=draw, dtype=torch.uint8)
    excesses = torch.randint(-(1 << 15), 1 << 15, (n_excesses,), generator=draw, dtype=torch.int16) >> seed % 9
    found, expected = torch.empty(n_values, dtype=torch.int16), torch.empty(n_values, dtype=torch.int16)
    made = kernels.unpack_symbols(found, packed, width, excesses)
    assert made == by_torch(lambda: kernels.unpack_symbols(expected, packed, width, excesses))
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("path")
@each_path
@given(SIZES, SEEDS, st.integers(-(1 << 40), 1 << 40))
def test_weighted_levels_are_added_exactly(n_values: int, seed: int, weight: int) -> None:
    levels = levels_of(n_values, seed)
    sums = torch.full((n_values + 2,), 5, dtype=torch.int64)
    add_levels(sums[1:-1], levels, weight)
    assert torch.equal(sums[1:-1], 5 + levels.to(torch.int64) * weight)
    assert sums[[0, -1]].tolist() == [5, 5]


@pytest.mark.usefixtures("path")
def test_what_lies_beside_the_buffers_is_left_alone() -> None:
    packed, excesses = kernels.pack_symbols(levels_of(1001, 3).to(torch.int16), 2)
    folded = torch.full((1003,), 7, dtype=torch.int16)
    kernels.unpack_symbols(folded[1:-1], packed, 2, excesses)
    assert folded[[0, -1]].tolist() == [7, 7]
    classes = torch.full((1003,), 3, dtype=torch.uint8)
    kernels.mix_dither_into(classes[1:-1], 5, 6, 128)
    assert classes[[0, -1]].tolist() == [3, 3]


def test_buffers_of_a_wrong_length_or_type_are_refused() -> None:
    folded, counted = torch.zeros(10, dtype=torch.int16), kernels.count(torch.zeros(10, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"must have shape \[10\]"):
        kernels.by_class(torch.zeros(9, dtype=torch.int32), counted)
    with pytest.raises(ValueError, match=r"must have shape \[10\]"):
        kernels.in_place(folded[1:], counted)
    with pytest.raises(ValueError, match=r"must have shape \[3\]"):
        kernels.unpack_symbols(folded, torch.zeros(2, dtype=torch.uint8), 2, folded)
    with pytest.raises(ValueError, match="1, 2, 4 or 8 bits, not 3"):
        kernels.pack_symbols(folded, 3)
    with pytest.raises(TypeError, match=r"type must be torch\.int16"):
        kernels.pack_symbols(folded.int(), 2)
    with pytest.raises(ValueError, match="must be a multiple of"):
        kernels.mix_dither_into(counted.classes, 1, 1, 64)


def test_the_paths_are_tried(path: native.Path) -> None:
    made = native.chosen()
    assert (native.Path.TORCH if made is None else made.path) == path
