"""How much of the planned work a client must have done for its update to be in a secure sum.

The sum of ten updates hides each of them as long as all ten are of one size. An update after one step of a thousand is
next to nothing, and the coordinator can bring it about: a site trains until the time that the assignment leaves is
over, and that time, and when the model arrives, are the coordinator's to choose for each site by itself. So the share
of the work is bound: the run file names the least (`SecurePlan.minimum_work`, which all clients sign), a site's policy
may ask more, and a client that has done less sends nothing.

With a floor f below 1 a coordinator can have all clients do f of their work in one sum, and in a second one, over
nearly the same model, have one of them do all: the difference is the last 1 - f of that client's work, and the chance
in the training of the others. So without noise all of the work is asked, unless run file and policy both say less.
Noise covers a client whatever the others contribute; there one step is enough.
"""

import math
from fractions import Fraction

from umbel.aggregation.plans.masks import ALL_STEPS, ONE_STEP

FLOOR_MIN = 1e-6
_DENOMINATOR_MAX = 1_000_000  # 0.1 means a tenth: three steps of thirty are enough for it


def usual_floor(*, has_noise: bool) -> float:
    """The floor where nobody names one."""
    return ONE_STEP if has_noise else ALL_STEPS


def require_floor(share: float, what: str) -> None:
    """Raise `ValueError` for what a run file or a policy cannot ask; a NaN is refused, too."""
    if not FLOOR_MIN <= share <= 1:
        raise ValueError(
            f"{what} must lie between {FLOOR_MIN:g} and 1, not {share!r:.40}: it is the least share of its planned "
            "steps that a client must have done to send a masked update"
        )


def steps_needed(floor: float, steps_planned: int) -> int:
    """How many of these steps a client must have done, 1 at least."""
    return max(1, math.ceil(Fraction(floor).limit_denominator(_DENOMINATOR_MAX) * steps_planned))
