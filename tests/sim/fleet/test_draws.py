"""Chance that hangs on a device alone: the same whoever else is asked, and as even as it should be."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.fleet.sure import require_drawn
from umbel.sim.fleet.draws import daily_words, normals, shuffled, uniforms, words

N = 100_000
seeds = st.integers(0, (1 << 63) - 1)


@given(seeds, st.lists(st.integers(0, 1 << 40), min_size=1, max_size=40), st.integers(0, 1 << 32))
def test_a_device_has_its_number_whoever_else_is_asked_in_whatever_order(
    seed: int, devices: list[int], order: int
) -> None:
    numbers = dict(zip(devices, normals(words(seed, np.array(devices), "speed")).tolist(), strict=True))
    some = np.random.default_rng(order).permutation(devices)[: len(devices) // 2 + 1]
    assert normals(words(seed, some, "speed")).tolist() == [numbers[int(device)] for device in some]


def test_uniform_numbers_are_even_and_normal_ones_normal() -> None:
    bits = words(1, np.arange(N), "anything")
    require_drawn(uniforms(bits))
    require_drawn(torch.special.ndtr(torch.from_numpy(normals(bits))).numpy())


def test_the_ends_of_what_words_can_be_are_still_numbers() -> None:
    ends = np.array([0, (1 << 64) - 1], np.uint64)
    assert 0 < uniforms(ends)[0] < uniforms(ends)[1] < 1
    assert np.isfinite(normals(ends)).all()


def test_purposes_seeds_and_days_have_nothing_to_do_with_each_other() -> None:
    devices = np.arange(N)
    days = np.zeros(N, np.int64)
    series = [
        words(1, devices, "a"),
        words(1, devices, "b"),
        words(2, devices, "a"),
        words(1, devices, "a", 1, 2),
        words(1, devices, "a", 12),
        daily_words(1, devices, days, "a"),
        daily_words(1, devices, days + 1, "a"),
        daily_words(1, devices, days - 1, "a"),
    ]
    table = np.corrcoef([uniforms(bits) for bits in series]) - np.eye(len(series))
    assert np.abs(table).max() < 6.5 / np.sqrt(N)


@given(seeds, st.integers(1, 3000), st.integers(0, 3))
def test_a_shuffle_is_a_permutation_and_can_be_had_in_parts(seed: int, n: int, attempt: int) -> None:
    whole = shuffled(seed, np.arange(n), n, "waiting", attempt)
    assert sorted(whole.tolist()) == list(range(n))
    part = np.arange(0, n, 3)
    assert shuffled(seed, part, n, "waiting", attempt).tolist() == whole[part].tolist()


@pytest.mark.parametrize("n", [1000, 1024, 1025])
def test_every_device_comes_to_every_place_of_a_shuffle(n: int) -> None:
    """Where two devices stand, over many attempts, is even, and where one does says nothing of the other."""
    first = np.array([shuffled(9, np.array([0, 1]), n, attempt) for attempt in range(4000)])
    require_drawn((first[:, 0] + 0.5) / n)
    require_drawn(((first[:, 1] - first[:, 0]) % n - 0.5) / (n - 1))
