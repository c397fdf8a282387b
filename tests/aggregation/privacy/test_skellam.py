"""Skellam noise: the documented function of the keystream, with the distribution that it should have."""

import hashlib
import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from tests.repository import VECTORS
from umbel.aggregation.plans.masks import NOISE_VALUES_MAX, VARIANCE_MAX, VARIANCE_MIN
from umbel.aggregation.privacy import skellam
from umbel.aggregation.privacy.skellam import Skellam
from umbel.aggregation.privacy.skellam_table import SkellamTable, magnitudes, table_of

FILE = VECTORS / "skellam.json"
KEY = bytes(range(32))
N = 200_000
LOG_FAILURE = 1e-6  # how seldom a right sampler fails a test of chance; keys are fixed, so it does not flicker


def key(number: int) -> bytes:
    return hashlib.sha256(f"test {number}".encode()).digest()


def word(of: bytes, stream: int, number: int) -> int:
    counter = stream.to_bytes(8, "big") + (number // 2).to_bytes(8, "big")
    block = Cipher(AES256(of), CTR(counter)).encryptor().update(bytes(16))
    return int.from_bytes(block[8 * (number % 2) :][:8], "little")


def sample_of(table: SkellamTable, first: int, second: int) -> int:
    """One sample of its two words, as the module says it, in plain integers."""
    bits = 127 - table.index_bits
    cell = (first >> (63 - table.index_bits)) % (1 << table.index_bits)
    rest = ((first << 64) + second) % (1 << bits)
    cut = (int(table.cuts[cell]) << 64) + int(table.low_cuts[cell])
    magnitude = int(table.outcomes[2 * cell + (rest < cut)])
    return -magnitude if first >> 63 else magnitude


def expected(variance: float, samples: Tensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Counts of the samples, and what they should be, in bins of ten expected ones or more."""
    top = int(8 * math.sqrt(variance)) + 8
    edges = np.arange(-top, top + 1)
    probabilities = stats.skellam.pmf(edges, variance / 2, variance / 2)
    counts = np.bincount((samples.numpy().clip(-top, top) + top), minlength=len(edges))
    bins = np.minimum(np.floor(np.cumsum(probabilities) * samples.numel() / 20), 400).astype(int)
    if bins.max() < 2:
        bins = np.sign(edges) + 1
    sums = [np.bincount(bins, weights=values) for values in (counts, probabilities * samples.numel())]
    kept = sums[1] >= 10
    inside = [values[kept] for values in sums]
    rest = [values[~kept].sum() for values in sums]
    return np.append(inside[0], rest[0]), np.append(inside[1], max(rest[1], samples.numel() - inside[1].sum(), 1e-9))


def fit(variance: float, samples: Tensor) -> float:
    """How often a right sampler is no nearer, by chi-square."""
    counts, wanted = expected(variance, samples)
    if wanted[-1] < 5:  # too few for a bin of their own
        counts, wanted = np.append(counts[:-2], counts[-2:].sum()), np.append(wanted[:-2], wanted[-2:].sum())
    return float(stats.chi2.sf(((counts - wanted) ** 2 / wanted).sum(), len(counts) - 1))


@pytest.mark.parametrize("variance", [0.01, 0.3, 1.0, 10.0, 1234.5, 1e6])
def test_samples_have_the_distribution(variance: float) -> None:
    assert fit(variance, Skellam(variance).draw(KEY, 0, N)) > LOG_FAILURE


def test_the_test_of_the_distribution_sees_a_variance_that_is_off() -> None:
    assert fit(10.5, Skellam(10.0).draw(KEY, 0, N)) < LOG_FAILURE


@pytest.mark.parametrize("variance", [0.01, 3.0, 1e4, 1e8, 2.0**30])
def test_moments(variance: float) -> None:
    x = Skellam(variance).draw(KEY, 0, N).to(torch.float64)
    assert abs(float(x.mean())) < 5 * math.sqrt(variance / N)
    fourth = 3 + 1 / variance  # of a Skellam variable, over the square of its variance
    assert abs(float(x.square().mean()) / variance - 1) < 5 * math.sqrt((fourth - 1) / N)
    assert abs(float((x**3).mean())) < 5 * math.sqrt((15 * variance**3 + 25 * variance**2 + variance) / N)


@pytest.mark.parametrize("variance", [2.0, 1e4])
def test_neighbours_and_keys_have_nothing_in_common(variance: float) -> None:
    noise = Skellam(variance)
    x, y = (noise.draw(key(i), 0, N).to(torch.float64) for i in range(2))
    for one, other in ((x[1:], x[:-1]), (x[2:], x[:-2]), (x[1 << 15 :], x[: -(1 << 15)]), (x, y), (x.abs(), y.abs())):
        pair = torch.stack([one, other])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / math.sqrt(one.numel())


@pytest.mark.parametrize(("variance", "n_clients"), [(0.5, 7), (20.0, 3)])
def test_the_sum_of_clients_noise_is_that_of_the_total(variance: float, n_clients: int) -> None:
    total = torch.zeros(N, dtype=torch.int64)
    for number in range(n_clients):
        Skellam(variance).add_to(total, key(number))
    assert fit(n_clients * variance, total) > LOG_FAILURE


@pytest.mark.parametrize("variance", [VARIANCE_MIN, 0.01, 5.0, 1e5, 3.0e8])
def test_a_sample_is_the_documented_function_of_its_words(variance: float) -> None:
    n_terms = 1 if variance < 2**27 else 4
    table, first, n = table_of(variance / n_terms), 123_456_789, 300
    wanted = [
        sum(sample_of(table, word(KEY, t, j), word(KEY, (1 << 63) + t, j)) for t in range(n_terms))
        for j in range(first, first + n)
    ]
    assert Skellam(variance).draw(KEY, first, n).tolist() == wanted


@given(st.integers(0, 70_000), st.integers(0, 100_000), st.lists(st.integers(0, 100_000), max_size=4))
@settings(max_examples=25, deadline=None)
def test_parts_add_up_to_the_whole_whatever_their_lengths(first: int, length: int, cuts: list[int]) -> None:
    noise, edges = Skellam(30.0), sorted({first, first + length, *(first + cut % (length + 1) for cut in cuts)})
    parts = [noise.draw(KEY, start, stop - start) for start, stop in pairwise(edges)]
    whole = noise.draw(KEY, first, length)
    assert torch.equal(torch.cat([torch.zeros(0, dtype=torch.int32), *parts]), whole)


def test_noise_is_added_in_place_and_wraps_as_int32_does() -> None:
    noise, alone = Skellam(1e6), Skellam(1e6).draw(KEY, 9, 1000)
    narrow = torch.full((1000,), 2**31 - 1, dtype=torch.int32)
    wide = torch.full((1000,), 2**40, dtype=torch.int64)
    noise.add_to(narrow, KEY, 9)
    noise.add_to(wide, KEY, 9)
    assert torch.equal(wide - 2**40, alone.to(torch.int64))
    assert torch.equal((narrow.to(torch.int64) - (2**31 - 1) - alone) % 2**32, torch.zeros(1000, dtype=torch.int64))


def test_a_first_word_equal_to_the_cut_is_settled_by_the_second() -> None:
    """It comes once in 2^45 samples or less: here the words are chosen."""
    table = table_of(1.0)
    lows = table.low_cuts.tolist()
    own = [i for i, low in enumerate(lows) if 0 < low < 2**64 - 1]
    words, seconds = list[int](), list[int]()
    for cell in own:
        for second in (lows[cell] - 1, lows[cell], lows[cell] + 1):
            words.append((cell << (63 - table.index_bits)) + int(table.cuts[cell]))
            seconds.append(second)
    assert len(own) > 5
    for sign in (0, 1 << 63):
        signed = np.array([one + sign for one in words], np.uint64).view(np.int64)
        buffers = skellam._Buffers(len(words))  # pyright: ignore[reportPrivateUsage] - no key gives such words
        found = buffers.samples(table, signed, seconds.__getitem__)
        wanted = [sample_of(table, one + sign, second) for one, second in zip(words, seconds, strict=True)]
        assert found.tolist() == wanted
    kept = [wanted[3 * i] != wanted[3 * i + 1] for i in range(len(own))]
    assert all(kept)  # so it was the second word that decided
    assert wanted[1::3] == wanted[2::3]


def frozen() -> dict[str, Any]:
    """What `tests/vectors/skellam.json` holds. It is frozen: it changes only with the protocol's version."""
    cases = [(0.01, 0), (1.0, 0), (1.0, 123_457), (2500.0, 0), (1e6, 7), (2.0**29, 0)]
    return {
        "about": "Skellam noise: samples number `first` on of a variance and a key; SHA-256 of 100,000, int32 LE.",
        "key_hex": KEY.hex(),
        "magnitudes_of_variance_1": [str(weight) for weight in magnitudes(1.0)],
        "samples": [
            {
                "variance": variance,
                "first": first,
                "values": (values := Skellam(variance).draw(KEY, first, 100_000))[:24].tolist(),
                "sha256": hashlib.sha256(values.numpy().astype("<i4").tobytes()).hexdigest(),
            }
            for variance, first in cases
        ],
    }


def test_the_frozen_vectors() -> None:
    assert frozen() == json.loads(FILE.read_text())


@pytest.mark.parametrize("variance", [0.0, VARIANCE_MAX * 2, math.nan, math.inf, -4.0])
def test_a_variance_beyond_the_bounds_is_refused(variance: float) -> None:
    with pytest.raises(ValueError, match="variance of noise must lie between"):
        Skellam(variance)


@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_a_key_of_another_length_is_refused_and_not_shown(length: int) -> None:
    with pytest.raises(ValueError, match="32 bytes") as caught:
        Skellam(1.0).draw(b"\x41" * length, 0, 1)
    assert "AAAA" not in str(caught.value)


@pytest.mark.parametrize(("first", "n"), [(-1, 1), (NOISE_VALUES_MAX, 1), (NOISE_VALUES_MAX - 1, 2)])
def test_more_samples_than_a_key_gives_are_refused(first: int, n: int) -> None:
    with pytest.raises(ValueError, match=r"gives samples 0 to 2\^40 - 1"):
        Skellam(1.0).draw(KEY, first, n)


@pytest.mark.parametrize("values", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int32)])
def test_what_is_no_vector_of_integers_is_refused(values: Tensor) -> None:
    with pytest.raises(ValueError, match="int32 or int64"):
        Skellam(1.0).add_to(values, KEY)
