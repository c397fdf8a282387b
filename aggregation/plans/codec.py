"""How the updates of a round become integers, as plain data: the codec, and the public grid of uncompressed updates.

`codec/vectors/registry.py` checks a codec's parameters. `update/grid.py` has the sums.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from fractions import Fraction
from typing import TypeAlias

from umbel.aggregation.types import NORM_MAX, NORM_MIN

INVERSE_STEP_MIN, INVERSE_STEP_MAX = 2.0**-100, 2.0**100  # levels per unit: far from where float32 ends

Parameter: TypeAlias = int | float | str


class Codec(IntEnum):
    """How an update's payload is written."""

    FLOAT32 = 0
    INTEGER = 1
    EDEN = 2
    SIGN = 3
    TERNARY = 4
    QSGD = 5
    TOPK = 6
    MASK = 7
    # 8 was low rank with a factor that a library had rounded (docs/decisions/0015-stated-order.md).
    PLANES = 9
    MASKED = 10
    LOWRANK = 11


@dataclass(frozen=True, slots=True)
class CodecPlan:
    """How the updates of a round are written. The default is float32."""

    codec: Codec = Codec.FLOAT32
    inverse_step: float = 0.0  # of the integer codec: levels per unit of a weight, a float32
    key: int = 0  # of all random draws
    clip_norm: float | None = None  # the greatest L2 norm of an update
    parameters: Mapping[str, Parameter] = field(default_factory=dict[str, Parameter])  # of codecs of vectors
    feedback: bool = False  # the unsent part is added to the next change (`feedback.py`)
    momentum: float | None = None  # of deep gradient compression; None without

    def __post_init__(self) -> None:
        if not 0 <= self.key < 1 << 63:
            raise ValueError(f"key must lie between 0 and 2^63 - 1, not {self.key}")
        if self.clip_norm is not None and not NORM_MIN <= self.clip_norm <= NORM_MAX:
            raise ValueError(f"clip_norm must lie between 2^-60 and 2^60, not {self.clip_norm!r}")
        if self.codec is Codec.MASKED:
            raise ValueError('a plan cannot name the codec "masked": name the codec "integer", and plan a secure round')
        if self.codec in (Codec.FLOAT32, Codec.INTEGER) and (
            self.parameters or self.feedback or self.momentum is not None
        ):
            raise ValueError(f"the codec {self.codec.name.lower()} takes no parameters, error feedback or momentum")
        if self.codec is Codec.INTEGER and not self._has_step():
            raise ValueError(f"inverse_step must be a float32 between 2^-100 and 2^100, not {self.inverse_step!r}")

    def at_step(self, step: float) -> "CodecPlan":
        """The same codec with this step, in units of a weight; as near as float32 and the bounds allow."""
        inverse = 1.0 / min(max(step, 1.0 / INVERSE_STEP_MAX), 1.0 / INVERSE_STEP_MIN)
        return replace(self, inverse_step=as_float32(min(max(inverse, INVERSE_STEP_MIN), INVERSE_STEP_MAX)))

    def scale(self, norm: float) -> float:
        """What to multiply an update of this L2 norm by, so that it is within `clip_norm`: 1 if it is."""
        return 1.0 if self.clip_norm is None or norm <= self.clip_norm else self.clip_norm / norm

    @property
    def words(self) -> str:
        """For people: `integer, step 0.00012`; `topk, share 0.01, error feedback`."""
        said = [f"step {1 / self.inverse_step:.3g}"] if self.codec is Codec.INTEGER else []
        said += [f"{name} {value}" for name, value in self.parameters.items()]
        said += [] if self.clip_norm is None else [f"clip_norm {self.clip_norm:g}"]
        said += ["error feedback"] if self.feedback else []
        said += [] if self.momentum is None else [f"momentum {self.momentum:g}"]
        return ", ".join([self.codec.name.lower(), *said])

    def _has_step(self) -> bool:
        return (
            INVERSE_STEP_MIN <= self.inverse_step <= INVERSE_STEP_MAX
            and as_float32(self.inverse_step) == self.inverse_step
        )


def as_float32(value: float) -> float:
    """The nearest float32. Raises `OverflowError` beyond its range."""
    nearest: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return nearest


@dataclass(frozen=True, slots=True)
class Part:
    """One client in a sum."""

    weight: int
    rank: int  # its place in the order of the cohort's names, from 0


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
            raise ValueError("with this step, a sum could overflow 63 bits: take a larger step")

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
            f"the weights of a round must add up to at least 1 and at most 2^38, not {total_weight_max}: "
            "lower sample_count_max or the number of clients asked"
        )
