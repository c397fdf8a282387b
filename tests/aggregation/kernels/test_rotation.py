"""The rotation against a plain matrix: orthonormal, its own inverse but for the signs, spread over the whole vector."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.aggregation.kernels.arguments import Blocks
from umbel.aggregation.kernels.philox import signs
from umbel.aggregation.kernels.rotation import rotate, unrotate

SIZES = st.integers(0, 6000)


def hadamard(size: int) -> torch.Tensor:
    """Sylvester's matrix, of +1 and -1."""
    matrix = torch.ones((1, 1), dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


@given(SIZES, st.integers(0, (1 << 63) - 1))
@settings(max_examples=30)
def test_it_is_the_matrix_product_of_the_blocks(n_values: int, key: int) -> None:
    blocks = Blocks.of(n_values)
    values = torch.randn(n_values, generator=torch.Generator().manual_seed(n_values))
    rotated = rotate(values, blocks, key)
    padded = torch.zeros(blocks.n_padded, dtype=torch.float64)
    padded[:n_values] = values
    for block in range(blocks.n_blocks):
        mine = [
            padded[row * blocks.n_blocks * blocks.side + block * blocks.side + column]
            for row in range(blocks.side)
            for column in range(blocks.side)
        ]
        place = slice(block * blocks.size, (block + 1) * blocks.size)
        signed = torch.stack(mine) * signs(key, 0, blocks.n_padded)[place]
        expected = hadamard(blocks.size) @ signed / blocks.side
        torch.testing.assert_close(rotated[place].double(), expected, rtol=0, atol=1e-4)


@given(SIZES)
@settings(max_examples=30)
def test_the_inverse_gives_the_vector_back(n_values: int) -> None:
    values = torch.randn(n_values, generator=torch.Generator().manual_seed(1))
    blocks = Blocks.of(n_values)
    back = unrotate(rotate(values, blocks, 9), blocks, 9)
    torch.testing.assert_close(back, values, rtol=0, atol=1e-5)


@given(st.integers(1, 10**12))
def test_padding_is_less_than_a_block_and_an_eighth_at_most(n_values: int) -> None:
    blocks = Blocks.of(n_values)
    is_made_odd = blocks.n_blocks >= 256 and blocks.n_blocks * blocks.size >= n_values + blocks.size
    assert blocks.n_values <= blocks.n_padded < n_values + blocks.size * (1 + is_made_odd)
    assert blocks.n_blocks < 256 or blocks.n_blocks % 2 == 1
    assert n_values < 128 or blocks.size <= n_values / 8


@pytest.mark.parametrize("place", [0, 77_777, 299_999])
def test_a_single_spike_is_spread_over_a_block(place: int) -> None:
    values = torch.zeros(300_000)
    values[place] = 1.0
    rotated = rotate(values, Blocks.of(300_000), 4)
    assert rotated.abs().max() == 1 / 64
    assert int((rotated != 0).sum()) == 4096


def test_a_small_layer_with_most_of_the_energy_reaches_many_blocks() -> None:
    """A last layer of a hundredth of the model: contiguous blocks would leave its energy in two of 74."""
    values = torch.zeros(300_000)
    values[:3000] = 1.0
    blocks = Blocks.of(300_000)
    energies = rotate(values, blocks, 4).view(blocks.n_blocks, -1).square().sum(1)
    assert int((energies > 0).sum()) >= 3000 // 64
