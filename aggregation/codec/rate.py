"""`name = "auto"`: as exact as the clients' lines carry, and never coarser than the run allows.

With the dither taken off, the error of one update is step^2 / 12 of its energy (`quantize.py`), so the error that the
run file allows is a coarsest step. Each halving of the step quarters the error and costs one bit a value. After each
round the finest step is taken that nine of ten clients could have sent within a twentieth of the window, by how fast
their uploads were; one that was not measured counts as the slowest, so that no client decides alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from umbel.aggregation.codec.plan import STEP_MIN
from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.stated_order import log2

ERROR_MIN, ERROR_MAX = 2.0**-19, 16.0  # so that the step stays within its own bounds
_WINDOW_SHARE = 1 / 20
_SLOWEST = 0.1  # the share of clients whose lines may be slower


@dataclass(frozen=True, slots=True)
class RoundShown:
    """What a committed round has shown of its updates, for the codec of the next.

    `update_rms`: the mean of their root mean squares, None where the codec does not measure it. `n_values` in each.
    `update_bytes`: of each on the wire; `bytes_per_s`: of the uploads that were measured; both in any order.
    """

    window_s: float
    n_values: int
    update_rms: float | None = None
    update_bytes: Sequence[int] = ()
    bytes_per_s: Sequence[float] = ()


def coarsest_step(error: float) -> float:
    """The step, in root mean squares of an update, at which its error is this share of its energy."""
    return math.sqrt(12 * error)


def step_for(before: CodecPlan, shown: RoundShown, coarsest: float) -> float:
    """The step of the next round, in root mean squares of an update: `coarsest`, or halved as often as there is time.

    `before`: the plan of the round that was shown.
    """
    if not shown.update_rms or not shown.update_bytes:
        return coarsest
    allowed = _slowest(shown) * shown.window_s * _WINDOW_SHARE
    sent, step_sent = max(shown.update_bytes), 1 / before.inverse_step / shown.update_rms
    step = coarsest
    while step / 2 >= STEP_MIN and sent + shown.n_values / 8 * log2(step_sent / (step / 2)) <= allowed:
        step /= 2
    return step


def _slowest(shown: RoundShown) -> float:
    """What nine of ten lines carry at least, in bytes per second; one that was not measured counts as carrying none."""
    n_unknown = max(len(shown.update_bytes) - len(shown.bytes_per_s), 0)
    rates = [0.0] * n_unknown + sorted(shown.bytes_per_s)
    return rates[int(_SLOWEST * len(rates))]
