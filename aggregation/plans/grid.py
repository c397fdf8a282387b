"""The public grid of a round: the step on which uncompressed updates become integers. `update/grid.py` has the sums."""

import math
from dataclasses import dataclass
from fractions import Fraction

_SUM_BITS = 62
TOTAL_WEIGHT_MAX = 1 << 38  # step <= 2^-24 max_abs: as fine as float32 is there; also exact as a float64
MAX_ABS_LEAST, MAX_ABS_MOST = 2.0**-64, 2.0**64  # far beyond any weight change; keeps every step a normal float64


@dataclass(frozen=True, slots=True)
class Grid:
    """The public grid of a round.

    `step`: D, a power of two, in the units of the weights. `max_abs`: greatest absolute value of one coordinate of a
    weight change. `total_weight_max`: greatest sum of weights that one round may fold.
    """

    step: float
    max_abs: float
    total_weight_max: int

    def __post_init__(self) -> None:
        _require_bounds(self.max_abs, self.total_weight_max)
        if not (math.isfinite(self.step) and self.step > 0 and math.frexp(self.step)[0] == 0.5):
            raise ValueError(f"step must be a power of two, not {self.step}")
        if Fraction(self.max_abs) * self.total_weight_max > Fraction(self.step) * (1 << _SUM_BITS):
            raise ValueError("this grid could overflow 63 bits: take a larger step")

    @classmethod
    def finest(cls, *, max_abs: float, total_weight_max: int) -> "Grid":
        """The grid with the smallest step whose sums cannot overflow."""
        _require_bounds(max_abs, total_weight_max)
        numerator, denominator = max_abs.as_integer_ratio()  # the denominator of a float is a power of two
        ceiling_bits = (numerator * total_weight_max - 1).bit_length()
        exponent = ceiling_bits - (denominator.bit_length() - 1) - _SUM_BITS
        return cls(math.ldexp(1.0, exponent), max_abs, total_weight_max)


def _require_bounds(max_abs: float, total_weight_max: int) -> None:
    if not MAX_ABS_LEAST <= max_abs <= MAX_ABS_MOST:  # also refuses a NaN
        raise ValueError(f"max_abs must lie between 2^-64 and 2^64, not {max_abs}")
    if not 1 <= total_weight_max <= TOTAL_WEIGHT_MAX:
        raise ValueError(
            f"the weights of a round may sum to between 1 and 2^38, not {total_weight_max}: "
            "lower sample_count_max or the number of clients asked"
        )
