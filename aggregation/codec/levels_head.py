"""The fixed beginning of codec 1's payload:

```
offset size field
     0    4 inverse_step    float32, levels per unit of a weight; must be the plan's, bit for bit
     4    4 norm            float32, the update's L2 norm in units of the weights, after clipping; exact values left out
     8    4 rank            the client's place in the cohort; must be the assignment's
    12    1 knowledge       what values are told apart by: 1, the energy of rows and columns; 2, the dither; 3, both
    13    3 reserved        zero
    16    8 widths          bits of the classes' symbols, two bits a class, lowest first: 0, 1, 2, 3 for 1, 2, 4, 8
```
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntFlag

from umbel.aggregation.codec.entropy import Widths
from umbel.aggregation.codec.entropy_kernels import N_CLASSES, WIDTHS
from umbel.aggregation.errors import MalformedUpdate

_HEAD = struct.Struct("<ffIB3sQ")
LEVELS_HEAD_BYTES = _HEAD.size


class Knowledge(IntFlag):
    """What both ends know of values, by which they are coded apart; see classes.py."""

    NOTHING = 0
    ENERGY = 1
    DITHER = 2
    BOTH = 3


@dataclass(frozen=True, slots=True)
class LevelsHead:
    inverse_step: float
    norm: float
    rank: int
    knowledge: Knowledge
    widths: Widths

    def encode(self) -> bytes:
        widths = sum(WIDTHS.index(width) << 2 * number for number, width in enumerate(self.widths))
        return _HEAD.pack(self.inverse_step, self.norm, self.rank, self.knowledge, bytes(3), widths)

    @classmethod
    def decode(cls, data: bytes) -> LevelsHead:
        """Raises `MalformedUpdate` for what `encode` could not have made."""
        inverse_step, norm, rank, knowledge, zero, widths = _HEAD.unpack(data)
        if any(zero) or knowledge > Knowledge.BOTH:
            raise MalformedUpdate("the integers' head is malformed; see docs/wire.md")
        by_class = tuple(WIDTHS[widths >> 2 * number & 3] for number in range(N_CLASSES))
        return cls(inverse_step, norm, rank, Knowledge(knowledge), by_class)
