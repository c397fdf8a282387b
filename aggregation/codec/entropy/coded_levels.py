"""Entropy coded levels of a model, coded by what both ends know: each row's and column's energy, and the dither.

If energies are used (`classes.py`), the bytes begin with a block of one byte for each row and column. Then follow the
segments (`entropy.py`). The head of the update or change says which knowledge is used, and the classes' widths.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import TypeAlias

from torch import Tensor

from umbel.aggregation.codec.entropy import entropy
from umbel.aggregation.codec.entropy.classes import Classes, EnergyMeter, Matrices
from umbel.aggregation.codec.entropy.entropy import Segment, Widths
from umbel.aggregation.codec.entropy.entropy_kernels import N_CLASSES, WIDTHS
from umbel.aggregation.codec.entropy.payload import Payload
from umbel.aggregation.errors import MalformedUpdate
from umbel.aggregation.model.layout import Layout

Dither: TypeAlias = tuple[int, int]
_CODING = struct.Struct("<B3sQ")


class Knowledge(IntFlag):
    """What both ends know of the values; it divides them into classes (`classes.py`)."""

    NOTHING = 0
    ENERGY = 1
    DITHER = 2
    BOTH = 3


@dataclass(frozen=True, slots=True)
class Coding:
    """How levels are coded.

    As bytes: the knowledge, three zeros, and the widths as 64 bits, two a class, lowest first: 0 to 3 for 1, 2, 4, 8.
    """

    knowledge: Knowledge  # which divides the values into classes
    widths: Widths  # of each class's symbols

    def encode(self) -> bytes:
        widths = sum(WIDTHS.index(width) << 2 * number for number, width in enumerate(self.widths))
        return _CODING.pack(self.knowledge, bytes(3), widths)

    @classmethod
    def decode(cls, data: bytes) -> "Coding":
        """The inverse of `encode`. Raises `MalformedUpdate` for other bytes."""
        knowledge, zero, widths = _CODING.unpack(data)
        if any(zero) or knowledge > Knowledge.BOTH:
            raise MalformedUpdate(
                "the head of the update's integers is malformed; docs/reference/wire.md has the format"
            )
        return cls(Knowledge(knowledge), tuple(WIDTHS[widths >> 2 * number & 3] for number in range(N_CLASSES)))


CODING_BYTES = _CODING.size
_HEAD = struct.Struct("<ffI")
LEVELS_HEAD_BYTES = _HEAD.size + CODING_BYTES


@dataclass(frozen=True, slots=True)
class LevelsHead:
    """The fixed beginning of codec 1's payload:

    ```
    offset size field
         0    4 inverse_step    float32, levels per unit of a weight; must be the plan's, bit for bit
         4    4 norm            float32, the update's L2 norm after clipping, without exact values, in weights
         8    4 rank            the client's rank in the cohort; must be the assignment's
        12   12 coding          how the values are coded (`Coding`)
    ```
    """

    inverse_step: float
    norm: float
    rank: int
    coding: Coding

    def encode(self) -> bytes:
        return _HEAD.pack(self.inverse_step, self.norm, self.rank) + self.coding.encode()

    @classmethod
    def decode(cls, data: bytes) -> "LevelsHead":
        """The inverse of `encode`. Raises `MalformedUpdate` for other bytes."""
        inverse_step, norm, rank = _HEAD.unpack(data[: _HEAD.size])
        return cls(inverse_step, norm, rank, Coding.decode(data[_HEAD.size :]))


class LevelsCoder:
    """Writes and reads the levels of a model with this layout."""

    def __init__(self, layout: Layout) -> None:
        self._n_values = layout.n_values
        self._matrices = Matrices(layout)

    @property
    def bytes_max(self) -> int:
        return entropy.block_bytes_max(self._matrices.n_bytes) + entropy.written_bytes_max(self._n_values)

    def new_meter(self, levels_per_unit: float) -> EnergyMeter:
        return EnergyMeter(self._matrices, levels_per_unit)

    def cheapest(self, sample: Sequence[tuple[int, Tensor]], energies: Tensor, dither: Dither | None) -> Coding:
        """The coding that makes the sample shortest. `sample`: segments with their first coordinates.

        `dither`: the cohort's key and the client's phi, or None without a dither.
        """
        found: list[tuple[int, Knowledge, Widths]] = []
        energy_bytes = len(entropy.write_block([energies]))
        share = sum(levels.numel() for _, levels in sample) / max(self._n_values, 1)
        for knowledge in map(Knowledge, range((Knowledge.ENERGY if dither is None else Knowledge.BOTH) + 1)):
            classes = self._classes(knowledge, energies, dither)
            widths, n_bytes = entropy.best_widths((levels, classes.of(at, levels.numel())) for at, levels in sample)
            if Knowledge.ENERGY in knowledge:
                n_bytes += math.ceil(share * energy_bytes)
            found.append((n_bytes, knowledge, widths))
        _, knowledge, widths = min(found)
        return Coding(knowledge, widths)

    def write(
        self, segments: Iterable[Tensor], coding: Coding, energies: Tensor, dither: Dither | None
    ) -> Iterator[bytes]:
        """Write all levels. `segments`: int32, `entropy.SEGMENT` values each."""
        classes, first = self._classes(coding.knowledge, energies, dither), 0
        if Knowledge.ENERGY in coding.knowledge:
            yield entropy.write_block([energies])
        for levels in segments:
            yield entropy.write_segment(levels, classes.of(first, levels.numel()), coding.widths)
            first += levels.numel()

    def read(self, payload: Payload, coding: Coding, dither: Dither | None) -> Iterator[Segment]:
        """The segments, up to the payload's end.

        Raises `MalformedUpdate` for bytes that `write` does not make, and `LyingLength` for a wrong length.
        """
        n_bytes, energies = self._matrices.n_bytes, None
        if Knowledge.ENERGY in coding.knowledge:
            energies = entropy.read_block(payload, range(n_bytes, n_bytes + 1))
        if Knowledge.DITHER in coding.knowledge and dither is None:
            raise MalformedUpdate(
                "the integers of this change of the model are coded with a dither; they must be coded without one"
            )
        classes = self._classes(coding.knowledge, energies, dither)
        for first in range(0, self._n_values, entropy.SEGMENT):
            here = classes.of(first, min(entropy.SEGMENT, self._n_values - first))
            yield entropy.read_segment(payload, here, coding.widths)
        payload.end()

    def _classes(self, knowledge: Knowledge, energies: Tensor | None, dither: Dither | None) -> Classes:
        is_by_energy, is_by_dither = Knowledge.ENERGY in knowledge, Knowledge.DITHER in knowledge
        return Classes(self._matrices, energies if is_by_energy else None, dither if is_by_dither else None)
