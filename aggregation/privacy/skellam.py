"""The noise of private rounds: Skellam noise from a key, added to levels whose sum of squares is bounded.

The sum of independent Skellam variables is a Skellam variable, and their variances add up. So each client adds its
share of the noise, and the noise in the sum of any clients is known exactly (Agarwal, Kairouz and Liu: The Skellam
mechanism for differentially private federated learning, NeurIPS 2021). For discrete Gaussians that is only nearly true.

Word number j of a keystream has 64 bits, and sample number j is a function of it (`skellam_table.py`). From the top,
they are the sign, the cell's index, and the bits that are compared with the cell's cut. So any part can be drawn alone,
and the samples do not depend on the lengths of the parts. The keystream is AES-256 in counter mode, counter block
(stream, block), both 64 bits big-endian; words are little-endian. Streams: t for the t-th term of a sum, 2^63 + t for
its second words. A variance above 2^27 is a sum of 2, 4, 8, ... terms. The distance from the distribution, in total
variation, is at most 2^-109 for each sample and term, if AES-256 is a pseudorandom function.

A million samples take 6 to 9 ms of one core (AMD EPYC), at variances from 0.01 to 10^8 alike.

Of the coordinator's claims, a contribution uses only the plan that the client has accepted. The sum of squares is
exact, and is that of the very integers that noise is added to. The time does not depend on the update: the coordinator
chooses the bound, and a clock would show on which side of it an update lies.
The time does not depend on the samples, except through caches: samples decide which entries of a table are read. An
attacker who can watch the caches of a client's processor has easier ways to its data.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray
from torch import Tensor

from umbel.aggregation.codec.rotated import Dither, Rotated, sum_of_squares
from umbel.aggregation.plans.masks import NOISE_VALUES_MAX, VARIANCE_MAX, VARIANCE_MIN, NoisePlan
from umbel.aggregation.privacy import skellam_table
from umbel.aggregation.privacy.sensitivity import clip_within
from umbel.aggregation.privacy.skellam_table import SkellamTable, table_of
from umbel.aggregation.types import NORM_MAX, NORM_MIN

KEY_BYTES = 32
_WORD_BYTES, _BLOCK_BYTES = 8, 16
_PART = 1 << 15  # samples at a time, so that they stay in the second-level cache
_SECOND = 1 << 63
_ZEROS = memoryview(bytes((_PART + 1) * _WORD_BYTES))

_Words: TypeAlias = NDArray[np.int64]
_Ints: TypeAlias = NDArray[np.int32]


class Skellam:
    """Noise of mean 0 and this `variance`, 2^-20 to 2^34. Raises `ValueError` for another variance.

    A key is 32 bytes, fresh from the operating system, and for one vector only. It allows the noise to be subtracted.
    """

    def __init__(self, variance: float) -> None:
        if not VARIANCE_MIN <= variance <= VARIANCE_MAX:
            raise ValueError(f"the variance of noise must lie between 2^-20 and 2^34, not {variance!r:.40}")
        self.variance = variance
        self._n_terms = 1
        while variance / self._n_terms > skellam_table.VARIANCE_MAX:
            self._n_terms *= 2  # so that the quotient is exact
        self._table = table_of(variance / self._n_terms)

    def add_to(self, values: Tensor, key: bytes, first: int = 0) -> None:
        """Add the samples from number `first` on to `values`, in place: int32 (which wraps at 2^32) or int64.

        `values` has one dimension, on any device; the processor draws the noise. Memory: 2 MB beside `values`, and 24
        bytes for each of the table's cells, of which there are at most 2^18.
        """
        if values.dtype not in (torch.int32, torch.int64) or values.dim() != 1:
            raise ValueError(
                f"noise can be added to one dimension of int32 or int64, not to "
                f"shape {list(values.shape)} of {values.dtype}"
            )
        for start, part in self._parts(key, first, values.numel()):
            place = values[start - first : start - first + len(part)]
            place.add_(torch.from_numpy(part).to(values.device))

    def draw(self, key: bytes, first: int, n_values: int) -> Tensor:
        """The samples from number `first` on: int32, `n_values`."""
        out = torch.zeros(n_values, dtype=torch.int32)
        self.add_to(out, key, first)
        return out

    def _parts(self, key: bytes, first: int, n_values: int) -> Iterator[tuple[int, _Ints]]:
        """Parts of the samples, each with its first number. Each part overwrites the one before."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a noise key must have {KEY_BYTES} bytes, not {len(key)}")
        if not (first >= 0 and 0 <= n_values <= NOISE_VALUES_MAX - first):
            raise ValueError(f"a noise key gives samples 0 to 2^40 - 1, not {n_values} samples from {first} on")
        buffers = _Buffers(min(_PART, n_values))
        for start in range(first, first + n_values, _PART):
            length = min(_PART, first + n_values - start)
            for term in range(self._n_terms):
                words = buffers.words(key, term, start, length)
                yield start, buffers.samples(self._table, words, _second_word(key, term, start))


class _Buffers:
    """Memory for `length` samples, allocated once for a vector, because allocation takes as long as the arithmetic."""

    def __init__(self, length: int) -> None:
        self._bytes = bytearray((length + 4) * _WORD_BYTES)  # a word ahead, and the room that update_into needs behind
        self._words: _Words = np.frombuffer(self._bytes, np.int64)
        self._longs: list[_Words] = [np.empty(length, np.int64) for _ in range(3)]
        self._ints: list[_Ints] = [np.empty(length, np.int32) for _ in range(2)]

    def words(self, key: bytes, stream: int, first: int, length: int) -> _Words:
        """The words of a stream from number `first` on: int64, `length`."""
        ahead = first % 2
        n_bytes = (ahead + length) * _WORD_BYTES
        _keystream(key, stream, first // 2).update_into(_ZEROS[:n_bytes], self._bytes)
        return self._words[ahead : ahead + length]

    def samples(self, table: SkellamTable, words: _Words, second_word: Callable[[int], int]) -> _Ints:
        """The samples of these words: int64 -> int32. `second_word`: of the sample at a place, 0 to 2^64 - 1."""
        n, rest_bits = len(words), 63 - table.index_bits
        rest, cut, cell = (one[:n] for one in self._longs)
        out, sign = (one[:n] for one in self._ints)
        np.right_shift(words, rest_bits, out=cell)
        np.bitwise_and(cell, (1 << table.index_bits) - 1, out=cell)
        np.take(table.cuts, cell, out=cut, mode="clip")  # all are within; "raise" would take a buffer of its own
        np.bitwise_and(words, (1 << rest_bits) - 1, out=rest)
        np.subtract(rest, cut, out=rest)
        if not rest.all():
            _settle(rest, cell, table, second_word)
        np.right_shift(rest, 63, out=rest)  # -1 where the cell's own number is drawn, 0 where its alias is
        np.left_shift(cell, 1, out=cell)
        np.subtract(cell, rest, out=cell)
        np.take(table.outcomes, cell, out=out, mode="clip")
        np.right_shift(words, 63, out=sign, casting="unsafe")
        np.bitwise_xor(out, sign, out=out)  # with the next line: the negative, where the sign is -1
        return np.subtract(out, sign, out=out)


def _settle(rest: _Words, cell: _Words, table: SkellamTable, second_word: Callable[[int], int]) -> None:
    """Decide the zeros of `rest`, where the first word equals the cut: -1 if the second word is less than its cut."""
    for place in np.flatnonzero(rest == 0).tolist():
        if second_word(place) < int(table.low_cuts[cell[place]]):
            rest[place] = -1


def _second_word(key: bytes, term: int, first: int) -> Callable[[int], int]:
    def word(place: int) -> int:
        block = _keystream(key, _SECOND + term, (first + place) // 2).update(bytes(_BLOCK_BYTES))
        return int.from_bytes(block[:_WORD_BYTES] if (first + place) % 2 == 0 else block[_WORD_BYTES:], "little")

    return word


def _keystream(key: bytes, stream: int, block: int) -> CipherContext:
    """Zeros encrypted with it are the keystream from this block on."""
    return Cipher(AES256(key), CTR(stream.to_bytes(8, "big") + block.to_bytes(8, "big"))).encryptor()


def contribution(rotated: Rotated, values: Tensor, dither: Dither, plan: NoisePlan, key: bytes) -> Iterator[Tensor]:
    """The client's vector as in `Modular.residues`, with noise: consecutive parts, int32.

    `values`: float32, `rotated.n_values`; they are not changed. `key`: 32 bytes, fresh from the operating system, for
    this vector only. Takes two passes over the vector, and the memory of a part. Raises `ValueError` as
    `Rotated.levels_with` does, and for a plan of another length.
    """
    if plan.n_values != rotated.n_levels:
        raise ValueError(f"the noise is planned for {plan.n_values} levels; an update has {rotated.n_levels}")
    noise, first = Skellam(plan.variance_per_client), 0
    for part in levels_within(plan.bound_squared, rotated, values, dither):
        noise.add_to(part, key, first)
        first += part.numel()
        yield part


def levels_within(bound_squared: int, rotated: Rotated, values: Tensor, dither: Dither) -> Iterator[Tensor]:
    """`Rotated.levels_with` of an update that is shortened until its sum of squares is at most `bound_squared`.

    The update is clipped to the norm that the bound allows (`sensitivity.py`), whatever the plan's clip norm is. If
    rounding still exceeds the bound, as once in 2^20 updates, all levels are zero. There are always two passes.
    """
    fitted = _fitted(bound_squared, rotated)
    found = sum(sum_of_squares(part) for part in fitted.levels_with(values, dither))
    return fitted.levels_with(values if found <= bound_squared else torch.zeros_like(values), dither)


def _fitted(bound_squared: int, rotated: Rotated) -> Rotated:
    """`rotated` with a clip norm that the bound allows. In every plan that umbel makes, this is the plan's own."""
    rate, clip = rotated.plan.inverse_step, rotated.plan.clip_norm
    most = math.inf if clip is None else clip * rate
    fits = clip_within(bound_squared, rotated.n_levels, most)
    if fits == most:
        return rotated
    return replace(rotated, plan=replace(rotated.plan, clip_norm=min(max(fits / rate, NORM_MIN), NORM_MAX)))
