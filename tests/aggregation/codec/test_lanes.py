"""Tensors that an all-reduce adds up: exact sums whatever they hold, no carries, and steps that find their size."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.aggregation.codec.all_reduce_rank import gradient, ways
from umbel.aggregation.codec import rotated as rotated_module
from umbel.aggregation.codec.lanes import BYTE_RANKS_MAX, AllReduced, ByteLanes, Lanes
from umbel.aggregation.codec.modular import lift
from umbel.aggregation.codec.rotated import Rotated
from umbel.aggregation.kernels.arguments import Levels
from umbel.aggregation.plans.codec import Codec, CodecPlan, as_float32


def rotated(n_values: int, step: float = 0.25) -> Rotated:
    return Rotated(CodecPlan(Codec.INTEGER, as_float32(1 / step), 17), n_values)


def summed(way: AllReduced, n_values: int, scale: float = 1.0) -> torch.Tensor:
    """As an all-reduce would: one tensor added to another, wrapping."""
    total = way.encode(scale * gradient(0, n_values), 0)
    for rank in range(1, way.n_ranks):
        total += way.encode(scale * gradient(rank, n_values), rank)
    return total


def levels_of(way: AllReduced, rank: int, n_values: int, levels: Levels, scale: float = 1.0) -> torch.Tensor:
    return torch.cat(list(way.rotated.levels(scale * gradient(rank, n_values), rank, levels))).to(torch.int64)


@given(st.integers(0, 9000), st.integers(1, 12), st.integers(3, 31), st.sampled_from([32, 64]), st.integers(-3, 8))
@settings(max_examples=60, deadline=None)
def test_lanes_hold_the_exact_sum_of_cut_levels(
    n_values: int, n_ranks: int, bits: int, word_bits: int, log_scale: int
) -> None:
    """Also where every level is cut: nothing carries into the next lane."""
    assume(((1 << bits) - 1) // (2 * n_ranks) >= 2)
    way = Lanes(rotated(n_values), n_ranks, bits=bits, word_bits=word_bits)
    cut = Levels(-way.level_max, way.level_max)
    exact = sum(levels_of(way, rank, n_values, cut, 2.0**log_scale) for rank in range(n_ranks))
    found = torch.cat(list(way.sums(summed(way, n_values, 2.0**log_scale))))
    assert torch.equal(found.to(torch.int64), torch.as_tensor(exact))


@given(st.integers(0, 9000), st.integers(1, BYTE_RANKS_MAX), st.integers(-3, 8))
@settings(max_examples=30, deadline=None)
def test_bytes_hold_the_sum_modulo_256(n_values: int, n_ranks: int, log_scale: int) -> None:
    way = ByteLanes(rotated(n_values), n_ranks)
    exact = sum(levels_of(way, rank, n_values, Levels(), 2.0**log_scale) for rank in range(n_ranks))
    found = torch.cat(list(way.sums(summed(way, n_values, 2.0**log_scale))))
    assert torch.equal(found, lift(torch.as_tensor(exact).to(torch.int32), 8))


@pytest.mark.parametrize("word_bits", [32, 64])
def test_a_word_has_as_many_lanes_as_fit(word_bits: int) -> None:
    way = Lanes(rotated(100_000), 3, bits=7, word_bits=word_bits)
    assert way.n_words == math.ceil(way.rotated.n_levels / (word_bits // 7))


@pytest.mark.parametrize("n_ranks", [8, 64])
def test_bytes_lose_what_their_docstring_says(n_ranks: int) -> None:
    """Of uncorrelated gradients: n * NMSE is D^2 / 12 with D = 6 sqrt(n) / 128 (note on compression, 4.4)."""
    n_values, step = 20_000, 6 * n_ranks**0.5 / 128
    way = ByteLanes(rotated(n_values, step), n_ranks)
    mean = sum((gradient(rank, n_values).double() for rank in range(n_ranks)), torch.zeros(1)) / n_ranks
    error = float((way.mean(summed(way, n_values)) - mean).square().mean()) * n_ranks
    assert error == pytest.approx(step**2 / 12, rel=0.1)


def way_at(kind: str, at: Rotated, n_ranks: int) -> AllReduced:
    return ByteLanes(at, n_ranks) if kind == "bytes" else Lanes(at, n_ranks, bits=8)


@pytest.mark.parametrize("factor", [2.0**-12, 1.0, 2.0**9])
@pytest.mark.parametrize("kind", ["bytes", "lanes"])
def test_the_step_finds_the_gradients_size(kind: str, factor: float) -> None:
    """From one that is far too fine or coarse: after some rounds the mean is as good as it can be."""
    n_values, n_ranks, at = 20_000, 4, rotated(20_000, factor)
    mean = sum((gradient(rank, n_values).double() for rank in range(n_ranks)), torch.zeros(1)) / n_ranks
    for _ in range(14):
        way = way_at(kind, at, n_ranks)
        at = Rotated(way.plan_after(summed(way, n_values)), n_values)
    way = way_at(kind, at, n_ranks)
    total = summed(way, n_values)
    error = float((way.mean(total) - mean).square().mean()) * n_ranks
    expected = 6 * n_ranks**0.5 / 128 if kind == "bytes" else 4.0 / (255 // (2 * n_ranks))
    assert 1 / at.plan.inverse_step == pytest.approx(expected, rel=0.05)
    assert error < 1.3 * expected**2 / 12


def test_a_sum_of_nothing_leaves_the_step_as_it_was() -> None:
    way = ByteLanes(rotated(1000), 2)
    zeros = way.encode(torch.zeros(1000), 0) + way.encode(torch.zeros(1000), 1)
    assert way.plan_after(zeros) == way.rotated.plan


def test_what_cannot_work_is_refused_with_what_to_do() -> None:
    at = rotated(1000)
    with pytest.raises(ValueError, match="between 1 and 64, not 65; use Lanes"):
        ByteLanes(at, 65)
    with pytest.raises(ValueError, match="too narrow for 100 ranks; take 9 bits or more"):
        Lanes(at, 100, bits=8)
    assert Lanes(at, 100, bits=9).level_max == 2
    with pytest.raises(ValueError, match="word_bits must be 32 or 64, not 16"):
        Lanes(at, 2, bits=8, word_bits=16)
    with pytest.raises(ValueError, match="bits must lie between 1 and 31, not 32"):
        Lanes(at, 2, bits=32)
    with pytest.raises(ValueError, match="sum more ranks in groups"):
        Lanes(at, 65_537, bits=31)
    with pytest.raises(ValueError, match="rank must lie between 0 and 1, not 2"):
        ByteLanes(at, 2).encode(torch.zeros(1000), 2)
    with pytest.raises(ValueError, match=r"shape \[1024\] and type torch\.int8, but has shape \[1000\]"):
        ByteLanes(at, 2).mean(torch.zeros(1000, dtype=torch.int8))
    with pytest.raises(
        ValueError, match=r"shape \[128\] and type torch\.int64, but has shape \[128\] and type torch\.int32"
    ):
        Lanes(at, 2, bits=8).plan_after(torch.zeros(128, dtype=torch.int32))


def test_a_vector_of_many_parts_is_that_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    n_values = 50_000
    way = Lanes(rotated(n_values), 2, bits=9)
    whole = way.encode(gradient(0, n_values), 0)
    sums = torch.cat(list(way.sums(whole)))
    monkeypatch.setattr(rotated_module, "_PART_CPU", 4096)
    assert torch.equal(way.encode(gradient(0, n_values), 0), whole)
    assert torch.equal(torch.cat(list(way.sums(whole))), sums)


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_replicas_of_a_real_all_reduce_are_bit_identical(tmp_path: Path, n_ranks: int) -> None:
    n_values = 100_003
    program = Path(__file__).with_name("all_reduce_rank.py")
    command = [sys.executable, str(program)]
    processes = [
        subprocess.Popen([*command, str(rank), str(n_ranks), str(tmp_path), str(n_values)]) for rank in range(n_ranks)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0] * n_ranks
    found = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(n_ranks)]
    for name, way in ways(n_values, n_ranks).items():
        cut = Levels(-way.level_max, way.level_max) if isinstance(way, Lanes) else Levels()
        exact = torch.stack([levels_of(way, rank, n_values, cut) for rank in range(n_ranks)]).sum(0)
        for replica in found:
            assert torch.equal(replica[f"{name}: sum"].to(torch.int64), exact)
            for what in ("mean", "next"):
                assert torch.equal(replica[f"{name}: {what}"], found[0][f"{name}: {what}"])
