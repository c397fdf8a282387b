"""Rounds of `umbel train`, as they are: what one costs beside its local steps, and how many steps it should have.

A round also encodes and hashes, gathers reports and makes the server's step. So it is measured whole.
"""

from dataclasses import dataclass, replace
from statistics import median

from umbel.aggregation.run.file import RunFile
from umbel.client.app import Client
from umbel.client.datacenter.doctor.advice import least_every, utilisation
from umbel.client.datacenter.doctor.timing import agreed_time
from umbel.client.datacenter.ranks.group import Group, GroupError
from umbel.client.datacenter.train.beginning import agreed, first_checkpoint
from umbel.client.datacenter.train.federation import GroupAttempt, GroupFederation
from umbel.client.errors import ClientError

_ROUNDS = 3  # the first is not counted
_ABOUT_AS_MANY = 1.25


@dataclass(frozen=True, slots=True)
class RoundAdvice:
    """`cost_s`: what a round takes beside its steps. `local_steps`: that reach the target. `predicted` and `measured`:
    the share of compute with so many; `measured` None: such a round takes too long to try.
    """

    cost_s: float
    local_steps: int
    predicted: float
    measured: float | None


def advised_rounds(
    group: Group, file: RunFile, app: Client, step_s: float, about_s: float, round_s_max: float
) -> RoundAdvice | str:
    """Carry out a few rounds of this run file with as many local steps as seem right, and then as are right; or say why
    these ranks cannot.

    `step_s`: of one step on the slowest rank. `about_s`: what a round may cost beside its steps. `round_s_max`: longer
    rounds are not tried. All are the same on every rank.
    """
    first = min(least_every(step_s, about_s), max(1, int(round_s_max / step_s)))
    try:
        first_s = _round_s(group, file, app, first)
        cost_s = max(first_s - first * step_s, 0.01 * first_s)
        steps = least_every(step_s, cost_s)
        found = RoundAdvice(cost_s, steps, utilisation(steps, step_s, cost_s), None)
        if steps * step_s + cost_s > round_s_max:
            return found
        if max(steps, first) > _ABOUT_AS_MANY * min(steps, first):
            first, first_s = steps, _round_s(group, file, app, steps)
        return replace(found, measured=min(1.0, first * step_s / first_s))
    except (ClientError, ValueError) as error:  # the same on every rank: they compare what they run before they begin
        return str(error)


def _round_s(group: Group, file: RunFile, app: Client, steps: int) -> float:
    """The median seconds of a round of so many steps on the slowest rank. Raises `GroupError` and `ValueError` if these
    ranks cannot carry it out.
    """
    training = replace(file.training, local_epochs=None, local_steps=steps)
    asked = replace(file, training=training, rounds=replace(file.rounds, count=_ROUNDS))
    on = agreed(group, asked, app)
    start = first_checkpoint(group, asked, on)
    run = GroupFederation(group, on.rank_client, on.sizes, start.standing, start.model)
    took = [_seconds(one) for one in run.attempts() if one.record.committed and one.record.task.makes_model]
    if not took:
        raise GroupError(f"all rounds were abandoned: {run.standing.reason}")
    return agreed_time(group, median(took[1:] or took))


def _seconds(attempt: GroupAttempt) -> float:
    cost = attempt.cost
    return cost.train_s + cost.wait_s + cost.sum_s + cost.apply_s
