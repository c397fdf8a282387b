"""What a plan says of quantization (`quantize.py`): step, dither and levels, without tensors."""

from __future__ import annotations

from dataclasses import dataclass

from umbel.aggregation.types import LEVEL_MAX

UNIT = 1 << 16
_GOLDEN = 40_503  # 2^16 times the golden ratio's fraction, rounded to an odd number: 65,536 clients differ


def phase(index: int) -> int:
    """phi of the client with this index in its cohort: 0 to 65,535."""
    return index * _GOLDEN % UNIT


@dataclass(frozen=True, slots=True)
class Levels:
    """The range of levels.

    A fixed width of b bits has 2^b levels. That is an even number, so they lie half a step off zero (`offset` = -2^15),
    symmetrically.
    """

    low: int = -LEVEL_MAX
    high: int = LEVEL_MAX
    offset: int = 0  # added before the cut, in 1/65,536 of a step

    @classmethod
    def of_width(cls, bits: int) -> Levels:
        """The 2^bits levels around zero, for widths from 1 to 15."""
        if not 1 <= bits <= 15:
            raise ValueError(f"a fixed width has 1 to 15 bits, not {bits}")
        return cls(-(1 << (bits - 1)), (1 << (bits - 1)) - 1, -(UNIT // 2))


@dataclass(frozen=True, slots=True)
class Quantizer:
    """How floats become levels (`quantize.py`)."""

    inverse_step: float
    key: int  # of the shared dither
    phi: int  # the client's part of the dither
    levels: Levels
