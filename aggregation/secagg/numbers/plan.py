"""The numbers of masked sums: the plan of each round, as it follows from the round before, and the work that it asks.

The codec's plan has the step D, its key and the clip norm. A client multiplies its clipped change x by its weight w
over `weight_unit`, rotates it and rounds it on D (`codec/rotated.py`). These integers are added modulo 2^bits. So the
bits do not grow with the weights:

    mean = (sum of levels) D weight_unit / (sum of w)

The unit is the same in all rounds of a run. It is a guess at a usual weight. From the second round on the step makes up
for a wrong guess, because it is measured on weighted changes.

The first round knows neither norms nor weights, and both may be off by orders of magnitude. A step that is too coarse
only adds noise; a sum that wraps destroys the model. So the first round takes enough bits for every possible sum, and
a step at which the expected update has 64 levels a value. Then weights (or norms) a hundredth of the expected ones are
rounded at 1.6 of their own root mean squares, and those a hundred times as large are not shortened yet. Every later
round takes the bits that hold a Gaussian sum half as large again as the last one (`codec/modular.py`).

**The least work.** The sum of ten updates hides each of them as long as all ten are of one size. An update after one
step of a thousand is next to nothing, and the coordinator can bring that about: a site trains until the assignment's
time is over, and the coordinator chooses that time, and when the model arrives, for each site. So the run file names
the least share of the work (`SecurePlan.minimum_work`, which all clients sign), a site's policy may ask more, and a
client that has done less sends nothing.

With a floor f below 1 a coordinator can have all clients do f of their work in one sum, and in a second one, over
nearly the same model, have one of them do all: the difference is the last 1 - f of that client's work, and the chance
in the training of the others. So without noise all of the work is asked, unless run file and policy both say less.
Noise covers a client whatever the others contribute; there one step is enough.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from umbel.aggregation.codec.step import ALARM_SHARE, bits_for
from umbel.aggregation.plans.codec import CodecPlan
from umbel.aggregation.plans.masks import ALL_STEPS, ONE_STEP, SecurePlan, SumShown
from umbel.aggregation.types import MetricNames

FIRST_RMS = 64.0  # levels: between the one step and the 32,766 / 5 to which clients shorten their changes
GROWTH = 1.5  # of the sum's spread from one round to the next


def secure_plan_after(
    before: SecurePlan, codec: CodecPlan, shown: SumShown, *, clients_max: int, minimum: int
) -> SecurePlan:
    """The plan of the next round, which has this `codec`, `clients_max` and `minimum`. `shown`: by the round before.

    The expected sum is `GROWTH` times the last one, scaled to the new number of clients. It is never less than a sum
    of independent updates, because updates that cancelled in one cohort may not cancel in the next.
    """
    asked = replace(before, clients_max=clients_max, minimum=minimum).unwrapping()
    if not shown.update_rms:
        return asked  # the updates were zero, so nothing is known of the next ones
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
    metrics: MetricNames = (),
    evaluation: MetricNames = (),
    minimum_work: float = ALL_STEPS,
    counts: Mapping[str, int] | None = None,
    evaluation_counts: Mapping[str, int] | None = None,
) -> tuple[CodecPlan, SecurePlan]:
    """The plans of a run's first round.

    `codec`: the integer codec at a step of the expected root mean square of a change with weight `weight_unit`.
    """
    secure = SecurePlan(
        1,
        weight_unit,
        clients_max,
        minimum,
        metrics=metrics,
        evaluation=evaluation,
        minimum_work=minimum_work,
        counts=counts or {},
        evaluation_counts=evaluation_counts or {},
    )
    return codec.at_step(1 / codec.inverse_step / FIRST_RMS), secure.unwrapping()


FLOOR_MIN = 1e-6
_DENOMINATOR_MAX = 1_000_000  # so that 0.1 is a tenth, and three steps of thirty are enough


def usual_floor(*, has_noise: bool) -> float:
    """The least share of the work (the floor) if neither run file nor policy names one."""
    return ONE_STEP if has_noise else ALL_STEPS


def require_floor(share: float, what: str) -> None:
    """Raise `ValueError` for a floor out of range, or a NaN."""
    if not FLOOR_MIN <= share <= 1:
        raise ValueError(
            f"{what} must lie between {FLOOR_MIN:g} and 1, not {share!r:.40}: it is the least share of the planned "
            "steps that a client must do before it sends a masked update"
        )


def steps_needed(floor: float, steps_planned: int) -> int:
    """The fewest of these steps that a client must have done, at least 1."""
    return max(1, math.ceil(Fraction(floor).limit_denominator(_DENOMINATOR_MAX) * steps_planned))
