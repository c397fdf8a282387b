"""Whole rounds of `umbel train`: what one costs beside its local steps, and how many local steps it should have.

A round also encodes and hashes updates, gathers reports, and makes the server's step. So whole rounds are measured.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from umbel.aggregation.run.file import RunFile
from umbel.client.app import Client
from umbel.client.datacenter.doctor.advice import falls_short, least_every, utilisation
from umbel.client.datacenter.doctor.timing import agreed_time
from umbel.client.datacenter.ranks.group import Group, GroupError
from umbel.client.datacenter.train.beginning import agreed, first_checkpoint
from umbel.client.datacenter.train.federation import GroupAttempt, GroupFederation
from umbel.client.errors import ClientError

_ROUNDS = 3  # the first is not counted
_ABOUT_AS_MANY = 1.25
_REFUTED_MAX = 1  # numbers of steps that are given up after a trial


@dataclass(frozen=True, slots=True)
class RefutedSteps:
    """A number of local steps with which a trial did not reach what was predicted."""

    local_steps: int
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class RoundAdvice:
    """The number of local steps with which `umbel train` reaches the target."""

    cost_s: float  # what a round takes beside its steps
    local_steps: int  # the fewest that reach the target
    predicted: float  # the share of compute with this number of steps
    measured: float | None  # the same; None: such a round takes too long to try
    refuted: tuple[RefutedSteps, ...] = ()  # what was tried before


def advised_rounds(
    group: Group, file: RunFile, app: Client, step_s: float, about_s: float, round_s_max: float
) -> RoundAdvice | str:
    """Carry out a few rounds of this run file with a first guess of the local steps, and then with the number that
    reaches the target. If these rounds cost more than the first ones, try the number that follows from them. Returns
    why, if these ranks cannot carry out the run file.

    All arguments are the same on every rank. `step_s`: seconds of one step on the slowest rank. `about_s`: a guess of
    what a round costs beside its steps. `round_s_max`: longer rounds are not tried.
    """
    first = min(least_every(step_s, about_s), max(1, int(round_s_max / step_s)))
    try:
        return tried_steps(lambda steps: _round_s(group, file, app, steps), first, step_s, round_s_max)
    except (ClientError, ValueError) as error:  # the same on every rank: they compare what they run before they begin
        return str(error)


def tried_steps(round_s: Callable[[int], float], first: int, step_s: float, round_s_max: float) -> RoundAdvice:
    """The number of local steps that reaches the target, by rounds of `first` steps and then of more. `round_s`: the
    seconds of a round with that many steps; it is called a few times. `step_s`, `round_s_max`: see `advised_rounds`.
    """
    tried, took_s, refuted = first, round_s(first), list[RefutedSteps]()
    while True:
        cost_s = max(took_s - tried * step_s, 0.01 * took_s)
        steps = least_every(step_s, cost_s)
        found = RoundAdvice(cost_s, steps, utilisation(steps, step_s, cost_s), None, tuple(refuted))
        if steps * step_s + cost_s > round_s_max:
            return found
        if max(steps, tried) > _ABOUT_AS_MANY * min(steps, tried):
            tried, took_s = steps, round_s(steps)
        measured = min(1.0, tried * step_s / took_s)
        if not falls_short(measured, found.predicted) or len(refuted) == _REFUTED_MAX:
            return replace(found, measured=measured)
        refuted.append(RefutedSteps(steps, found.predicted, measured))


def _round_s(group: Group, file: RunFile, app: Client, steps: int) -> float:
    """The median seconds of a round with `steps` local steps on the slowest rank.

    Raises `GroupError` and `ValueError` if these ranks cannot carry out such a round.
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
