"""What a round says of the numbers that are masked; and how it follows from the round before.

Beside the codec's plan, which has the step D, its key and the clip norm. A client multiplies its clipped change x by
its weight w over `weight_unit`, rotates it and rounds it on D (`codec/rotated.py`); what is added up is those integers
modulo 2^bits. So the bits do not grow with the weights:

    mean = (sum of levels) D weight_unit / (sum of w)

The unit is the same in all rounds of a run. It is a guess at a usual weight, and what it is off by the step makes good
from the second round on, for that is measured on weighted changes.

The first round knows neither norms nor weights, and both may be off by orders of magnitude. A step that is too coarse
only adds noise; a sum that wraps destroys the model. So it takes as many bits as no sum can exceed, whatever the levels
are, and a step with which the expected update stands at 64 levels a value: weights (or norms) a hundredth of what was
expected are rounded at 1.6 of their own root mean squares, those a hundred times as large are not shortened yet. Every
later round takes the bits that hold a Gaussian sum at half as much again as the last one showed (`codec/modular.py`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from umbel.aggregation.codec.residue_bits import ALARM_SHARE, bits_for
from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.plans.masks import ALL_STEPS, SecurePlan, SumShown

FIRST_RMS = 64.0  # levels: between the one step and the 32,766 / 5 to which clients shorten their changes
GROWTH = 1.5  # of the sum's spread from one round to the next


def secure_plan_after(
    before: SecurePlan, codec: CodecPlan, shown: SumShown, *, clients_max: int, minimum: int
) -> SecurePlan:
    """The plan of the round after this one. `codec`: of that round; `shown`: by this one; the rest: as that asks.

    The sum is expected to have as large a share of each client as before, or at least what clients add up to that
    have nothing in common: updates that cancelled in one cohort need not in the next.
    """
    asked = replace(before, clients_max=clients_max, minimum=minimum).unwrapping()
    if not shown.update_rms:
        return asked  # nothing has changed, so nothing is known of what comes
    ratio = clients_max / shown.n_clients
    expected = max(
        GROWTH * shown.spread * (ratio if ratio > 1 else math.sqrt(ratio)),
        math.sqrt(clients_max) * shown.update_rms,
    )
    bits = bits_for(inverse_step=codec.inverse_step, sigma_sum=expected, n_clients=clients_max)
    bits += shown.share_near_the_edge > ALARM_SHARE
    return replace(asked, bits=min(bits, asked.bits))


def first_plans(
    codec: CodecPlan,
    *,
    weight_unit: int,
    clients_max: int,
    minimum: int,
    is_proportional: bool = False,
    metrics: tuple[str, ...] = (),
    evaluation: tuple[str, ...] = (),
    minimum_work: float = ALL_STEPS,
) -> tuple[CodecPlan, SecurePlan]:
    """The numbers of a run's first round. `codec`: the integer codec at a step of the root mean square that a client's
    change of weight `weight_unit` is expected to have.
    """
    secure = SecurePlan(1, weight_unit, clients_max, minimum, is_proportional, metrics, evaluation, None, minimum_work)
    return codec.at_step(1 / codec.inverse_step / FIRST_RMS), secure.unwrapping()
