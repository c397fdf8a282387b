"""Integers of many ranks as words that an all-reduce adds up, and the integers' exact sums from the words' sum.

Gloo and NCCL add int8, int32 and int64 modulo 2^8, 2^32 and 2^64 (and no int16). An integer of few bits would waste
most of such a word, so a word of 64 bits holds several, in lanes of L bits:

    word = k_0 + k_1 2^L + k_2 2^2L + ...     modulo 2^64,    k signed

Words add up to S_0 + S_1 2^L + ..., where S_j is the sum of all ranks' k_j. The lowest L bits are S_0, as a signed
number. Subtracted and shifted out, they leave S_1 in the lowest bits, and so on. This is exact as long as every *sum*
fits its lane, from -2^(L-1) to 2^(L-1) - 1, however large a single rank's integers are. So the bits are those of a
secure round's plan (`bits_for` in `codec/step.py`), and the sums are those of its modular sum. (A sum beyond its lane
is wrong in both. Here it also moves the sum in the next lane by one.) The all-reduce may add in any order.

7 and 8 bits are sent as int8, which needs no lanes. More than 21 bits are sent as int32.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from umbel.aggregation.codec.modular import lift
from umbel.aggregation.types import RESIDUE_BITS_MAX

_WORD, _BYTE = 64, 8
_BYTES = range(7, 9)  # bits of which a byte wastes less than one


class Lanes:
    """The words of `n_values` integers whose sums have `bits` bits, a signed one among them.

    Position p stands in word p mod `n_words`, in lane p div `n_words`, counted from the lowest bit.
    """

    def __init__(self, n_values: int, bits: int) -> None:
        """Raises `ValueError` for bits that no word holds."""
        if not 1 <= bits <= RESIDUE_BITS_MAX:
            raise ValueError(f"bits must lie between 1 and {RESIDUE_BITS_MAX}, not {bits}")
        self.n_values = n_values
        self.bits = bits
        n_lanes = _WORD // bits
        if bits in _BYTES or n_lanes < 3:
            self.dtype, self._n_lanes, self._width = torch.int8 if bits in _BYTES else torch.int32, 1, bits
        else:
            self.dtype, self._n_lanes, self._width = torch.int64, n_lanes, _WORD // n_lanes
        self.n_words = -(-n_values // self._n_lanes)

    @property
    def n_bytes(self) -> int:
        """The length of the words in bytes."""
        return self.n_words * self.dtype.itemsize

    def zeros(self, device: torch.device | None = None) -> Tensor:
        """The words of a rank that adds nothing: `dtype`, `n_words`."""
        return torch.zeros(self.n_words, dtype=self.dtype, device=device)

    def words(self, parts: Iterable[Tensor], device: torch.device | None = None) -> Tensor:
        """A rank's integers as words on `device`: `dtype`, `n_words`.

        `parts`: consecutive parts of `n_values` integers in all, int32, on any device. Raises `ValueError` for another
        number.
        """
        out, first = self.zeros(device), 0
        for part in parts:
            if first + part.numel() > self.n_values:
                raise ValueError(f"a vector must have {self.n_values} integers, not more")
            here = part.to(out.device)
            if self._n_lanes == 1:
                out[first : first + part.numel()] = lift(here, self.bits)
            else:
                for lane, places, of_part in self._runs(first, part.numel()):
                    out[places] += here[of_part].to(torch.int64) << lane * self._width
            first += part.numel()
        if first != self.n_values:
            raise ValueError(f"a vector must have {self.n_values} integers, not {first}")
        return out

    def sums(self, summed: Tensor) -> Tensor:
        """The sums of the ranks' integers: int32, `n_values`, on the device of `summed`.

        `summed`: the sum of the ranks' words, which is written over. Raises `ValueError` for a tensor that is not such
        a sum.
        """
        if summed.shape != (self.n_words,) or summed.dtype != self.dtype:
            raise ValueError(
                f"the sum must have shape [{self.n_words}] and type {self.dtype}, but has shape "
                f"{list(summed.shape)} and type {summed.dtype}"
            )
        if self._n_lanes == 1:
            return lift(summed.to(torch.int32), self.bits)
        out = torch.empty(self.n_values, dtype=torch.int32, device=summed.device)
        unused = _WORD - self._width
        for lane in range(self._n_lanes):
            lowest = (summed << unused) >> unused
            start = lane * self.n_words
            stop = min(start + self.n_words, self.n_values)
            if start < stop:
                out[start:stop] = lowest[: stop - start]
            summed.sub_(lowest).bitwise_right_shift_(self._width)
        return lift(out, self.bits)

    def _runs(self, first: int, n_positions: int) -> Iterator[tuple[int, slice, slice]]:
        """By lane: the words, and which of these positions stand in them."""
        at, stop = first, first + n_positions
        while at < stop:
            lane, word = divmod(at, self.n_words)
            n = min(self.n_words - word, stop - at)
            yield lane, slice(word, word + n), slice(at - first, at - first + n)
            at += n
