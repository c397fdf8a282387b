"""What follows an abandoned attempt: the next one, later each time, with those who failed it asked last. Pure."""

from collections.abc import Collection

from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.round.coverage import Roll, gaps
from umbel.aggregation.round.second_sum import OpenedSum, with_sum
from umbel.aggregation.round.states import Abandoned, Recruiting, SumsBefore
from umbel.aggregation.secagg.turns import is_late
from umbel.aggregation.types import ClientId

AVOIDED_MAX = 1000  # names kept for the next attempt: 20 kB; in a larger cohort nobody was singled out by failing
_DOUBLINGS_MAX = 30


def next_attempt(failed: Abandoned, plan: RoundPlan, now: float) -> Recruiting:
    """The state with which the round is tried again. `plan`: that of the next attempt."""
    pause_s = retry_pause_s(plan)
    why = "no client has checked in yet"
    if pause_s:
        why = f"attempt {plan.attempt} begins {pause_s:.1f} s after the last, which was abandoned: {failed.reason}"
    avoid, since = _who_failed(failed), now + pause_s
    liars = tuple(client for client in avoid if client in _who_lied(failed))
    return Recruiting(plan, since, why, not_before=since, avoid=avoid, before=sums_before(failed, liars))


def sums_before(failed: Abandoned, liars: tuple[ClientId, ...] = ()) -> SumsBefore | None:
    """The sums over its model that were unmasked without a model coming of them, its own included; None if none was."""
    opened = failed.secure.opened
    if failed.secure.was_revealed:
        opened = with_sum(opened, OpenedSum(tuple(sorted(failed.accepted)), len(failed.cohort)))
    return SumsBefore(opened, liars) if opened else None


def retry_pause_s(plan: RoundPlan) -> float:
    """How long to wait before this attempt: nothing before the second, then patience, doubling up to the window."""
    if plan.attempt < 3:
        return 0.0
    return min(plan.patience_s * 2.0 ** min(plan.attempt - 3, _DOUBLINGS_MAX), plan.window_s)


def gives_up(failed: Abandoned, attempts_max: int | None) -> str | None:
    """Why the run fails instead of trying again, in a sentence; None while it may try."""
    plan = failed.plan
    if attempts_max is None or plan.attempt < attempts_max:
        return None
    times = "once" if plan.attempt == 1 else f"{plan.attempt} times"
    return (
        f"round {plan.number} was abandoned {times}, and the run file allows no more (rounds.attempts_max); "
        f"the last time because {failed.reason}"
    )


def _who_failed(failed: Abandoned) -> tuple[ClientId, ...]:
    """By whom an attempt failed; nobody if an operator ended it, or a sum that is nobody's fault."""
    names = failed.secure.blamed or _who_did_not_report(failed)
    return tuple(sorted(names)) if len(names) <= AVOIDED_MAX else ()


def _who_lied(failed: Abandoned) -> Collection[ClientId]:
    """Clients to blame for a sum that was unmasked without effect, and that were not merely silent."""
    secure = failed.secure
    return {client for client, why in secure.blamed.items() if not is_late(why)} if secure.was_revealed else ()


def _who_did_not_report(failed: Abandoned) -> Collection[ClientId]:
    """Who was missed in an attempt that failed for want of reports."""
    roll = Roll(failed.plan, failed.cohort, failed.accepted, failed.missing)
    has_enough = len(failed.accepted) >= failed.plan.minimum
    if has_enough and not (failed.plan.coverage.strict and gaps(roll)):
        return ()
    return failed.missing.keys()
