"""Integers modulo 2^m: what they sum to is the plain sum as long as that fits, and masks leave no trace."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.federations.own_dithers import dither_of
from umbel.aggregation.codec.modular import Modular, lift
from umbel.aggregation.codec.rotated import Rotated
from umbel.aggregation.codec.step import ALARM_SHARE, bits_for
from umbel.aggregation.kernels.packing import pack
from umbel.aggregation.plans.codec import Codec, CodecPlan, as_float32
from umbel.aggregation.types import LEVEL_MAX
from umbel.sim.bench.codec.bench import real_updates, vnmse

BITS = st.integers(1, 32)


def modular(n_values: int, bits: int, step: float = 0.25) -> Modular:
    return Modular(Rotated(CodecPlan(Codec.INTEGER, as_float32(1 / step), 29), n_values), bits)


def gaussian(n_values: int, seed: int) -> Tensor:
    return torch.randn(n_values, generator=torch.Generator().manual_seed(seed))


def encoded(codec: Modular, values: Tensor, rank: int) -> Tensor:
    return torch.cat(list(codec.packed(codec.residues(values, dither_of(rank)))))


def summed(codec: Modular, vectors: list[Tensor]) -> Tensor:
    sums = codec.new_sum()
    for rank, values in enumerate(vectors):
        codec.add(sums, encoded(codec, values, rank))
    return sums


def plain_sum(codec: Modular, vectors: list[Tensor]) -> Tensor:
    levels = [
        torch.cat(list(codec.rotated.levels_with(values, dither_of(rank)))) for rank, values in enumerate(vectors)
    ]
    return torch.stack(levels).to(torch.int64).sum(0)


@given(st.integers(0, 9000), BITS, st.integers(1, 9), st.integers(-4, 9))
@settings(max_examples=60, deadline=None)
def test_the_sum_is_the_plain_one_modulo_and_equal_to_it_where_it_fits(
    n_values: int, bits: int, n_clients: int, log_scale: int
) -> None:
    codec = modular(n_values, bits)
    vectors = [gaussian(n_values, seed) * 2.0**log_scale for seed in range(n_clients)]
    exact, lifted = plain_sum(codec, vectors), lift(summed(codec, vectors), bits).to(torch.int64)
    fits = (exact >= -(1 << (bits - 1))) & (exact < 1 << (bits - 1))
    assert torch.equal(lifted[fits], exact[fits])
    assert not ((lifted - exact) % (1 << bits)).any()


@given(st.integers(0, 9000), BITS, st.integers(1, 6), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_masks_that_are_taken_off_again_leave_no_trace(n_values: int, bits: int, n_clients: int, seed: int) -> None:
    """Uniform modulo 2^m, added before packing; their sum comes off the sum."""
    codec, generator = modular(n_values, bits), torch.Generator().manual_seed(seed)
    vectors = [gaussian(n_values, i) for i in range(n_clients)]
    bare, masked = summed(codec, vectors), codec.new_sum()
    for rank, values in enumerate(vectors):
        mask = torch.randint(0, 1 << bits, (codec.rotated.n_levels,), generator=generator).to(torch.int32)
        residues = torch.cat(list(codec.residues(values, dither_of(rank)))) + mask
        codec.add(masked, torch.cat(list(codec.packed([residues]))))
        masked -= mask
    assert torch.equal(lift(masked, bits), lift(bare, bits))
    assert torch.equal(codec.mean(masked, n_clients), codec.mean(bare, n_clients))


@given(st.integers(0, 80_000), BITS, st.integers(0, 65_535))
@settings(max_examples=30, deadline=None)
def test_the_parts_are_packed_as_the_whole_is(n_values: int, bits: int, rank: int) -> None:
    codec, values = modular(n_values, bits), gaussian(n_values, 3) * 100
    whole = torch.cat(list(codec.residues(values, dither_of(rank))))
    packed = encoded(codec, values, rank)
    assert torch.equal(packed, pack(whole, bits))
    assert packed.numel() == codec.n_bytes


@given(st.integers(-(1 << 31), (1 << 31) - 1), BITS)
def test_lifting_gives_the_number_nearest_to_zero(value: int, bits: int) -> None:
    lifted = int(lift(torch.tensor([value], dtype=torch.int32), bits))
    assert -(1 << (bits - 1)) <= lifted < 1 << (bits - 1)
    assert (lifted - value) % (1 << bits) == 0


@pytest.mark.parametrize("step", [0.26, 0.52])
def test_the_error_of_a_gaussian_mean_is_the_steps_whatever_the_number(step: float) -> None:
    """n * NMSE = D^2 / 6: of stochastic rounding, each client with a dither of its own."""
    for n_clients in (1, 20, 64):
        codec = modular(20_000, 12, step)
        vectors = [gaussian(20_000, seed) for seed in range(n_clients)]
        mean = torch.stack(vectors).double().mean(0)
        found = codec.mean(summed(codec, vectors), n_clients)
        assert float((found - mean).square().mean()) * n_clients == pytest.approx(step**2 / 6, rel=0.06)


@pytest.mark.nightly
# Step in rms, bits, and the error.
@pytest.mark.slow
@pytest.mark.parametrize(("step", "bits", "error_max"), [(0.5, 7, 2.7e-2), (0.25, 8, 7.0e-3)])
def test_the_mean_of_real_updates_is_as_good_as_the_docstring_says(step: float, bits: int, error_max: float) -> None:
    updates = list(real_updates())
    mean = torch.stack(updates).double().mean(0)
    rms = float(torch.stack(updates).double().square().mean().sqrt())
    codec = modular(updates[0].numel(), bits, step * rms)
    sums = summed(codec, updates)
    assert vnmse(mean, codec.mean(sums, len(updates))) < error_max
    assert codec.share_near_the_edge(sums) < ALARM_SHARE
    assert torch.equal(lift(sums, bits).to(torch.int64), plain_sum(codec, updates))  # nothing has wrapped
    assert 8 * codec.n_bytes / updates[0].numel() < bits + 0.1


# At D = .26 rms, by clients: bits if they have nothing in common, and if they are all the same (note, 4.1).
@pytest.mark.parametrize(("n", "apart", "same"), [(10, 8, 9), (100, 9, 13), (1000, 11, 16), (10_000, 13, 19)])
def test_the_bits_are_those_of_the_note(n: int, apart: int, same: int) -> None:
    assert bits_for(inverse_step=1 / 0.26, sigma_sum=math.sqrt(n), n_clients=n) == apart
    assert bits_for(inverse_step=1 / 0.26, sigma_sum=n, n_clients=n) == same


@given(st.integers(1, 65_536), st.floats(0, 1e300), st.floats(2.0**-99, 2.0**99))
def test_the_bits_can_be_sent_and_never_exceed_what_any_sum_needs(n: int, sigma: float, inverse_step: float) -> None:
    bits = bits_for(inverse_step=inverse_step, sigma_sum=sigma, n_clients=n)
    assert 1 <= bits <= 32
    assert 1 << (bits - 2) <= n * LEVEL_MAX


def test_the_alarm_counts_what_is_near_the_edge() -> None:
    codec = modular(1000, 8)
    sums = codec.new_sum()
    sums[:5], sums[5:9], sums[9:11] = 96, 97, -128  # three quarters of 128 are 96
    assert codec.share_near_the_edge(sums) == 6 / codec.rotated.n_levels


def test_what_cannot_work_is_refused_with_what_to_do() -> None:
    codec = modular(1000, 8)
    with pytest.raises(ValueError, match="between 1 and 32, not 33; a larger step needs fewer bits"):
        modular(1000, 33)
    with pytest.raises(ValueError, match="aggregate more clients in groups"):
        bits_for(inverse_step=1, sigma_sum=1, n_clients=65_537)
    with pytest.raises(ValueError, match="sigma_sum must not be negative"):
        bits_for(inverse_step=1, sigma_sum=math.nan, n_clients=2)
    with pytest.raises(ValueError, match="a packed vector must have 1024 bytes, not 1023"):
        codec.add(codec.new_sum(), torch.zeros(1023, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"the sum must have shape \[1024\] and type torch\.int32"):
        codec.mean(torch.zeros(1000, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match="at least one client"):
        codec.mean(codec.new_sum(), 0)
