"""How the integer codec's step follows from the round before.

The step of the integer codec is `step` (of the run file) times the root mean square of one client's update, as the
round before measured it: the error of one update is then about step^2 / 12 of its energy. The first round takes the
norm that the run file expects. So the step is public before anyone trains, and no client chooses it. It grows fourfold
a round at most: one client with an update far beyond the others' must not make the next round useless.
"""

import math
from dataclasses import replace

from umbel.aggregation.plans.codec import Codec, CodecPlan

STEP_MIN, STEP_MAX = 2.0**-8, 16.0
GROWTH_MAX = 4.0


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
