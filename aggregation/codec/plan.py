"""What a round says of how its updates are written; and how that follows from the round before it.

The step of the integer codec is `step` (of the run file) times the root mean square of one client's update, as the
round before measured it: the error of one update is then about step^2 / 12 of its energy. The first round takes the
norm that the run file expects. So the step is public before anyone trains, and no client chooses it. It grows fourfold
a round at most: one client with an update far beyond the others' must not make the next round useless.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace

from umbel.aggregation.wire import Codec

STEP_MIN, STEP_MAX = 2.0**-8, 16.0
GROWTH_MAX = 4.0
NORM_MIN, NORM_MAX = 2.0**-60, 2.0**60
_RATE_MIN, _RATE_MAX = 2.0**-100, 2.0**100  # of levels per unit: far from where float32 ends


@dataclass(frozen=True, slots=True)
class CodecPlan:
    """How the updates of a round are written. The default is float32, which no bytes are saved by.

    The integer codec's: `inverse_step`, levels per unit of a weight, a float32; `key`, of its dither; `clip_norm`, the
    greatest L2 norm of an update.
    """

    codec: Codec = Codec.FLOAT32
    inverse_step: float = 0.0
    key: int = 0
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if self.codec is Codec.FLOAT32:
            return
        if not _RATE_MIN <= self.inverse_step <= _RATE_MAX or as_float32(self.inverse_step) != self.inverse_step:
            raise ValueError(f"inverse_step must be a float32 between 2^-100 and 2^100, not {self.inverse_step!r}")
        if not 0 <= self.key < 1 << 63:
            raise ValueError(f"key must lie between 0 and 2^63 - 1, not {self.key}")
        if self.clip_norm is not None and not NORM_MIN <= self.clip_norm <= NORM_MAX:
            raise ValueError(f"clip_norm must lie between 2^-60 and 2^60, not {self.clip_norm!r}")

    def at_step(self, step: float) -> CodecPlan:
        """The same codec with this step, in units of a weight; as near as float32 and the bounds allow."""
        inverse = 1.0 / min(max(step, 1.0 / _RATE_MAX), 1.0 / _RATE_MIN)
        return replace(self, inverse_step=as_float32(min(max(inverse, _RATE_MIN), _RATE_MAX)))


def first_plan(*, step: float, norm: float, n_values: int, key: int, clip_norm: float | None) -> CodecPlan:
    """The integer codec of a run's first round. `norm`: what an update's L2 norm is expected to be."""
    plan = CodecPlan(Codec.INTEGER, 1.0, key, clip_norm)
    return plan.at_step(step * norm / math.sqrt(max(n_values, 1)))


def next_plan(before: CodecPlan, *, step: float, update_rms: float | None, key: int) -> CodecPlan:
    """The integer codec of the round after a round whose updates had this root mean square; None: it is not known."""
    plan = replace(before, key=key)
    if not update_rms:
        return plan
    return plan.at_step(min(step * update_rms, GROWTH_MAX / before.inverse_step))


def as_float32(value: float) -> float:
    """The nearest float32. Raises `OverflowError` beyond its range."""
    nearest: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return nearest
