"""Classes: what both ends know of each value, the same at both ends and for any part of the vector."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from umbel.aggregation.codec.entropy.classes import Classes, EnergyMeter, Matrices
from umbel.aggregation.codec.entropy.entropy_kernels import MIRRORED, N_CLASSES
from umbel.aggregation.errors import MalformedUpdate
from umbel.aggregation.kernels.arguments import Levels, phase
from umbel.aggregation.kernels.philox import dither
from umbel.aggregation.kernels.quantize import quantize
from umbel.aggregation.model.layout import Layout

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=6)
LAYOUT = Layout.of_state({"a": torch.zeros(300), "b": torch.zeros(20, 4, 8), "c": torch.tensor(0.0)})


def layout_of(shapes: list[tuple[int, ...]]) -> Layout:
    return Layout.of_state({f"{number:03}": torch.zeros(shape) for number, shape in enumerate(shapes)})


def random_energies(matrices: Matrices, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 128, (matrices.n_bytes,), generator=draw, dtype=torch.uint8)


def test_a_tensor_is_a_matrix_if_it_has_sixteen_rows_of_sixteen_values_or_more() -> None:
    found = [(matrix.n_rows, matrix.width) for matrix in Matrices(LAYOUT)]
    assert found == [(2, 256), (20, 32), (1, 1)]
    assert Matrices(LAYOUT).n_bytes == 2 + 256 + 20 + 32 + 1 + 1


@given(SHAPES, st.integers(0, 20_000), st.integers(1, 5_000))
def test_patches_cover_a_part_once_and_in_order(shapes: list[tuple[int, ...]], first: int, length: int) -> None:
    layout = layout_of(shapes)
    first = min(first, layout.n_values)
    length = min(length, layout.n_values - first)
    at = 0
    for patch in Matrices(layout).patches(first, length):
        rows, columns = range(10**6)[patch.rows], range(10**6)[patch.columns]
        places = [patch.matrix.offset + row * patch.matrix.width + column for row in rows for column in columns]
        assert places == list(range(first + at, first + at + len(places)))
        assert patch.place == slice(at, at + len(places))
        at += len(places)
    assert at == length


@given(SHAPES, st.integers(0, 1000))
def test_the_energy_of_a_value_is_its_rows_and_its_columns(shapes: list[tuple[int, ...]], seed: int) -> None:
    matrices = Matrices(layout_of(shapes))
    energies = random_energies(matrices, seed)
    whole = Classes(matrices, energies, None).of(0, layout_of(shapes).n_values)
    for matrix in matrices:
        rows, columns = energies[matrix.rows].int(), energies[matrix.columns].int()
        expected = ((rows.unsqueeze(1) + columns - 64) >> 1).clamp(0, 15).flatten()[: matrix.n_values]
        assert torch.equal(whole[matrix.offset : matrix.offset + matrix.n_values].int(), expected)


@given(st.integers(0, 7), st.integers(1, 700), st.integers(0, 1 << 63), st.integers(0, 70_000))
def test_a_part_is_a_part_of_the_whole(group: int, length: int, key: int, rank: int) -> None:
    matrices = Matrices(LAYOUT)
    classes = Classes(matrices, random_energies(matrices), (key, phase(rank)))
    first = 128 * group
    length = min(length, LAYOUT.n_values - first)
    assert torch.equal(classes.of(first, length), classes.of(0, LAYOUT.n_values)[first : first + length])


@given(st.integers(0, 1 << 63), st.integers(0, 70_000), st.integers(0, 1000))
def test_a_mirrored_value_is_the_level_of_the_mirrored_input(key: int, rank: int, seed: int) -> None:
    """floor(-x + ~f) = -floor(x + f) in fixed point: after mirroring, all dithers are below a half."""
    values = torch.randn(600, generator=torch.Generator().manual_seed(seed)) * 3
    fraction = (dither(key, 0, 600) + phase(rank)) & 0xFFFF
    is_mirrored = Classes(Matrices(layout_of([(600,)])), None, (key, phase(rank))).of(0, 600) >= MIRRORED
    assert torch.equal(is_mirrored, fraction >= 1 << 15)
    below = torch.where(is_mirrored, 0xFFFF - fraction, fraction)
    levels = quantize(values, 1.0, fraction, 0, Levels())
    mirrored = quantize(torch.where(is_mirrored, -values, values), 1.0, below, 0, Levels())
    assert torch.equal(torch.where(is_mirrored, -levels, levels), mirrored)


def test_quiet_values_are_told_apart_by_a_quarter_of_the_dither() -> None:
    layout = layout_of([(512, 64)])
    matrices = Matrices(layout)
    energies = torch.full((matrices.n_bytes,), 32, dtype=torch.uint8)
    energies[:256] += 12  # rows of energy 6; the others have 0
    classes = Classes(matrices, energies, (9, 0)).of(0, layout.n_values) & (N_CLASSES - 1)
    fraction = dither(9, 0, layout.n_values)
    is_far = torch.minimum(fraction, 0xFFFF - fraction) >= 1 << 14
    assert torch.equal(classes[: 256 * 64], torch.full((256 * 64,), 6, dtype=torch.uint8))
    assert torch.equal(classes[256 * 64 :], (16 * is_far[256 * 64 :]).to(torch.uint8))


@given(st.integers(0, 1000), st.integers(1, 500))
def test_what_the_meter_finds_is_close_to_the_energy_of_each_value(seed: int, n_piece: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    rows, columns = (2.0 ** torch.randint(-3, 5, (n, m), generator=draw) for n, m in ((40, 1), (1, 50)))
    sizes = (rows * columns).flatten()
    signs = torch.randint(0, 2, sizes.shape, generator=draw) * 2 - 1
    matrices = Matrices(layout_of([(40, 50)]))
    meter, first = EnergyMeter(matrices, 2.0), 0
    for part in (sizes * signs).split(n_piece):
        meter.add(first, part)
        first += part.numel()
    found = Classes(matrices, meter.energies(0.5), None).of(0, sizes.numel())
    expected = (sizes.log2() + 5).clamp(0, 15)
    assert float((found - expected).abs().max()) <= 1


@given(st.integers(0, 1000), st.floats(1e-4, 1e4), st.integers(1, 900), st.integers(1, 900))
def test_the_bytes_do_not_depend_on_the_parts_that_a_vector_comes_in(
    seed: int, levels_per_unit: float, n_piece: int, n_other: int
) -> None:
    """As every machine's library adds in an order of its own, so do parts of other lengths."""
    matrices = Matrices(LAYOUT)
    values = torch.randn(LAYOUT.n_values, generator=torch.Generator().manual_seed(seed)).pow_(5)
    found = list[torch.Tensor]()
    for length in (n_piece, n_other):
        meter, first = EnergyMeter(matrices, levels_per_unit), 0
        for part in values.split(length):
            meter.add(first, part)
            first += part.numel()
        found.append(meter.energies())
    assert torch.equal(*found)


def test_bytes_are_the_nearest_half_octaves() -> None:
    """By sizes on either side of each quarter of an octave: 16 rows, each of one size."""
    matrices, steps = Matrices(layout_of([(16, 16)])), torch.arange(16, dtype=torch.float64)
    for nudge, expected in ((-1e-4, steps), (1e-4, steps + 1)):
        sizes = 2.0 ** ((steps + 0.5) / 2 + nudge)
        meter = EnergyMeter(matrices, 64.0)
        meter.add(0, sizes.to(torch.float32).repeat_interleave(16))
        assert (meter.energies(1 / 64)[:16].to(torch.float64) - 32 - 10).tolist() == expected.tolist()


def test_a_vector_of_nothing_but_zeros_has_no_energy() -> None:
    matrices = Matrices(LAYOUT)
    meter = EnergyMeter(matrices, 8.0)
    meter.add(0, torch.zeros(LAYOUT.n_values))
    assert not Classes(matrices, meter.energies(), None).of(0, LAYOUT.n_values).any()


def test_an_energy_beyond_the_scale_is_refused() -> None:
    matrices = Matrices(LAYOUT)
    energies = random_energies(matrices)
    energies[3] = 128
    with pytest.raises(
        MalformedUpdate, match="the energy byte 128 for a row or column of a tensor; at most 127 is allowed"
    ):
        Classes(matrices, energies, None)
