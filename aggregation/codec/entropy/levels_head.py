"""The fixed beginning of codec 1's payload:

```
offset size field
     0    4 inverse_step    float32, levels per unit of a weight; must be the plan's, bit for bit
     4    4 norm            float32, the update's L2 norm in units of the weights, after clipping; exact values left out
     8    4 rank            the client's place in the cohort; must be the assignment's
    12   12 coding          what values are told apart by, and the width of their symbols (`coded_levels.py`)
```
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from umbel.aggregation.codec.entropy.coded_levels import CODING_BYTES, Coding

_HEAD = struct.Struct("<ffI")
LEVELS_HEAD_BYTES = _HEAD.size + CODING_BYTES


@dataclass(frozen=True, slots=True)
class LevelsHead:
    inverse_step: float
    norm: float
    rank: int
    coding: Coding

    def encode(self) -> bytes:
        return _HEAD.pack(self.inverse_step, self.norm, self.rank) + self.coding.encode()

    @classmethod
    def decode(cls, data: bytes) -> LevelsHead:
        """Raises `MalformedUpdate` for what `encode` could not have made."""
        inverse_step, norm, rank = _HEAD.unpack(data[: _HEAD.size])
        return cls(inverse_step, norm, rank, Coding.decode(data[_HEAD.size :]))
