"""The step of the integer codec, as it follows from the round before, and the bits that a sum of levels needs.

The step is `step` (of the run file) times the root mean square of one client's update, as the round before measured it.
Then the squared error of one update is about step^2 / 12 of its squared norm (its energy). The first round takes the
norm that the run file expects. So the step is public before training, and no client chooses it. It grows fourfold a
round at most: one client whose update is far larger than the others' must not make the next round useless.

With `name = "auto"` the step is as fine as the clients' connections allow, and never coarser than the run file allows.
Each halving of the step quarters the error and costs one bit a value. After each round the next step is the finest that
nine of ten clients could have uploaded within a twentieth of the window, at the rates of their last uploads. A client
without a measured rate counts as the slowest, so that no client decides alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from umbel.aggregation.plans.codec import Codec, CodecPlan
from umbel.aggregation.stated_order import ceil_log2, log2
from umbel.aggregation.types import COHORT_MAX, LEVEL_MAX

STEP_MIN, STEP_MAX = 2.0**-8, 16.0
ERROR_MIN, ERROR_MAX = 2.0**-19, 16.0  # so that the step stays within its own bounds
GROWTH_MAX = 4.0
_WINDOW_SHARE = 1 / 20
_SLOWEST = 0.1  # the share of clients whose connections may be slower


@dataclass(frozen=True, slots=True)
class RoundShown:
    """What a committed round has shown of its clients' work, for the codec and FedProx's mu of the next."""

    window_s: float
    n_values: int  # in each update
    update_rms: float | None = None  # the mean of the updates' root mean squares; None if the codec does not measure it
    update_bytes: Sequence[int] = ()  # the length of each update, in any order
    bytes_per_s: Sequence[float] = ()  # the measured rates of uploads, in any order
    loss: float | None = None  # the mean training loss in its record; None without one


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


SIGMAS = 6.0
ALARM_SHARE = 1e-4  # of coordinates near the edge: above it, the next round needs one bit more
_ROUNDING_VARIANCE = 1 / 6  # of floor(x + a uniform number), over x and the number, in squared steps


def bits_for(*, inverse_step: float, sigma_sum: float, n_clients: int) -> int:
    """The bits that hold the sum of `n_clients` vectors, up to `SIGMAS` standard deviations of a rotated coordinate.

    `sigma_sum`: the expected standard deviation of the sum's coordinates, in units of the weights. It may grow, so take
    the last round's times 1.5, for example. A rotated sum is Gaussian, and rounding adds n / 6 squared steps, so

        m = ceil(log2(2 t sqrt((sigma_sum / D)^2 + n / 6)))

    with t = `SIGMAS`: one coordinate in 5e8 wraps. (Bonawitz, Salehi, Konecny, McMahan and Gruteser: Federated learning
    with autotuned communication-efficient secure aggregation, 2019, wrap a rotated sum in the same way.) Doubling the
    clients adds half a bit if their updates are independent, and one bit if they are equal. The result never exceeds
    the bits of n times the greatest level. Raises `ValueError` for an impossible cohort or expectation.
    """
    if not 1 <= n_clients <= COHORT_MAX:
        raise ValueError(
            f"n_clients must lie between 1 and {COHORT_MAX}, not {n_clients}; aggregate more clients in groups"
        )
    if not (inverse_step > 0 and 0 <= sigma_sum < math.inf):
        raise ValueError("the step must be positive, and sigma_sum must not be negative")
    in_steps = sigma_sum * inverse_step
    spread = math.sqrt(in_steps * in_steps + n_clients * _ROUNDING_VARIANCE)
    bits_max = (n_clients * LEVEL_MAX).bit_length() + 1
    return max(1, ceil_log2(min(2 * SIGMAS * spread, 2.0**bits_max)))
