"""The step of the integer codec: how it follows from the round before.

The step is `step` (of the run file) times the root mean square of one client's update, as the round before measured it.
Then the error of one update is about step^2 / 12 of its energy. The first round takes the norm that the run file
expects. So the step is public before training, and no client chooses it. It grows fourfold a round at most: one client
whose update is far larger than the others' must not make the next round useless.

With `name = "auto"` the step is as fine as the clients' connections allow, and never coarser than the run file allows.
With the dither subtracted, the error of one update is step^2 / 12 of its energy (`quantize.py`), so the error that the
run file allows gives a coarsest step. Each halving of the step quarters the error and costs one bit a value. After each
round the next step is the finest that nine of ten clients could have uploaded within a twentieth of the window, at the
rates of their last uploads. A client without a measured rate counts as the slowest, so that no client decides alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from umbel.aggregation.logarithms import log2
from umbel.aggregation.plans.codec import Codec, CodecPlan

STEP_MIN, STEP_MAX = 2.0**-8, 16.0
ERROR_MIN, ERROR_MAX = 2.0**-19, 16.0  # so that the step stays within its own bounds
GROWTH_MAX = 4.0
_WINDOW_SHARE = 1 / 20
_SLOWEST = 0.1  # the share of clients whose connections may be slower


@dataclass(frozen=True, slots=True)
class RoundShown:
    """What a committed round has shown of its updates, for the codec of the next."""

    window_s: float
    n_values: int  # in each update
    update_rms: float | None = None  # the mean of the updates' root mean squares; None if the codec does not measure it
    update_bytes: Sequence[int] = ()  # the length of each update, in any order
    bytes_per_s: Sequence[float] = ()  # the measured rates of uploads, in any order


def first_plan(*, step: float, norm: float, n_values: int, key: int, clip_norm: float | None) -> CodecPlan:
    """The integer codec of a run's first round. `norm`: the expected L2 norm of an update."""
    plan = CodecPlan(Codec.INTEGER, 1.0, key, clip_norm)
    return plan.at_step(step * norm / math.sqrt(max(n_values, 1)))


def next_plan(before: CodecPlan, *, step: float, update_rms: float | None, key: int) -> CodecPlan:
    """The integer codec of the next round. `update_rms`: of the updates of the round before, None if unknown."""
    plan = replace(before, key=key)
    if not update_rms:
        return plan
    return plan.at_step(min(step * update_rms, GROWTH_MAX / before.inverse_step))


def coarsest_step(error: float) -> float:
    """The step, in root mean squares of an update, at which its error is this share of its energy."""
    return math.sqrt(12 * error)


def step_for(before: CodecPlan, shown: RoundShown, coarsest: float) -> float:
    """The step of the next round with "auto", in root mean squares: `coarsest`, halved as often as there is time for.

    `before`: the plan of the round that `shown` describes.
    """
    if not shown.update_rms or not shown.update_bytes:
        return coarsest
    allowed = _slow_rate(shown) * shown.window_s * _WINDOW_SHARE
    sent, step_sent = max(shown.update_bytes), 1 / before.inverse_step / shown.update_rms
    step = coarsest
    while step / 2 >= STEP_MIN and sent + shown.n_values / 8 * log2(step_sent / (step / 2)) <= allowed:
        step /= 2
    return step


def _slow_rate(shown: RoundShown) -> float:
    """The rate, in bytes per second, that nine of ten clients reach. A rate that was not measured counts as 0."""
    n_unknown = max(len(shown.update_bytes) - len(shown.bytes_per_s), 0)
    rates = [0.0] * n_unknown + sorted(shown.bytes_per_s)
    return rates[int(_SLOWEST * len(rates))]
