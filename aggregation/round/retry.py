"""After an abandoned attempt: which clients failed it, and the next attempt, which asks them last. Pure.

A secure round blames clients that were asked and stayed silent, and clients whose shares do not open or are withheld. A
round that fails through no client, by an operator's order or by an impossible sum, blames none.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from umbel.aggregation.messages import Outcome
from umbel.aggregation.phrases import counted, some
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.round.coverage import Roll, gaps
from umbel.aggregation.round.second_sum import OpenedSum, with_sum
from umbel.aggregation.round.states import Abandoned, Closing, Recruiting, Revealed, SumsBefore
from umbel.aggregation.secagg.turns import Phase, is_late
from umbel.aggregation.types import ClientId

_UNHEARD = "had not reported: "


def unheard(clients: Iterable[ClientId], reason: str) -> dict[ClientId, str]:
    """A reason for each client that had neither reported nor declined when the round ended for this reason."""
    return dict.fromkeys(clients, f"{_UNHEARD}{reason}")


def is_unheard(reason: str) -> bool:
    """Whether a missing client's reason says that it had neither reported nor declined."""
    return reason.startswith(_UNHEARD)


def late_for(phase: Phase, asked: Iterable[ClientId], spoke: Collection[ClientId]) -> dict[ClientId, str]:
    """A reason for each client that was asked in a phase and missed it."""
    heard = frozenset(spoke)
    return {client: phase.late_words for client in asked if client not in heard}


def left_out_by_themselves(state: Closing) -> dict[ClientId, str]:
    """Clients missing through their own fault (not because the target was reached), each with its reason.

    Others may have refused the sum because of them.
    """
    had_enough = state.late is Outcome.SURPLUS
    return {client: why for client, why in state.missing.items() if not (had_enough and is_unheard(why))}


def not_unmasked(state: Closing, agreed: Collection[ClientId], revealed: Revealed) -> tuple[str, dict[ClientId, str]]:
    """Why a sum could not be unmasked in time (empty if unknown), and the clients to blame, each with its reason."""
    lacking, withheld = (
        {client: of[client] for client in sorted(of) if client in state.cohort}
        for of in (revealed.lacking, revealed.withheld)
    )
    found = [f"too few shares opened of those that {some([*lacking])} dealt"] if lacking else []
    found += [f"{some([*withheld])} withheld shares of clients whose other holders revealed theirs"] if withheld else []
    both = {client: f"{lacking[client]}; {withheld[client]}" for client in lacking.keys() & withheld.keys()}
    silent = late_for(Phase.UNMASKING, agreed, revealed.clients)
    return "; ".join(found), {**silent, **lacking, **withheld, **both}


AVOIDED_MAX = 1000  # names kept for the next attempt, 20 kB; more failures than that are not the clients' fault
_DOUBLINGS_MAX = 30
DECLINED_ATTEMPTS_MAX = 10  # about an hour with a window of ten minutes


def next_attempt(failed: Abandoned, plan: RoundPlan, now: float) -> Recruiting:
    """The state that begins the next attempt, which has this plan."""
    pause_s = retry_pause_s(plan)
    why = "no client has checked in yet"
    if pause_s:
        why = f"attempt {plan.attempt} begins {pause_s:.1f} s after the last, which was abandoned: {failed.reason}"
        why += f"; {declined}" if (declined := declines(failed)) else ""
    avoid, since = _who_failed(failed), now + pause_s
    liars = tuple(client for client in avoid if client in _who_lied(failed))
    return Recruiting(plan, since, why, not_before=since, avoid=avoid, before=sums_before(failed, liars))


def sums_before(failed: Abandoned, liars: tuple[ClientId, ...] = ()) -> SumsBefore | None:
    """The sums over its model that were unmasked but made no model, its own included; None if there are none."""
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
        f"the last time because {failed.reason}" + (f"; {declined}" if (declined := declines(failed)) else "")
    )


def needs_a_person(failed: Abandoned, attempts_max: int | None) -> str | None:
    """Why the run pauses until an operator resumes it, in a sentence; None while it may try again by itself.

    Clients decline because of a policy, an earlier sum, or an error in their own code. None of these ends by itself.
    """
    plan, n_declined = failed.plan, len(_who_declined(failed))
    is_lasting = n_declined > 0 and (plan.is_secure or len(failed.cohort) - n_declined < plan.minimum)
    if attempts_max is not None or plan.attempt < DECLINED_ATTEMPTS_MAX or not is_lasting:
        return None
    return (
        f"round {plan.number} was abandoned {plan.attempt} times, the last time because {failed.reason}; "
        f"{declines(failed)}. Remove the cause, then resume the run, or stop it"
    )


def _who_declined(failed: Abandoned) -> Mapping[ClientId, str]:
    """The clients that declined the round or its sum, each with its reason."""
    before = {client: why for client, why in failed.missing.items() if not (is_unheard(why) or is_late(why))}
    return {**before, **failed.secure.refused}


def declines(failed: Abandoned) -> str:
    """How many clients declined, and their most frequent reason, without names; empty if none declined.

    Other clients may read it: a client's reason has no secrets.
    """
    reasons = Counter(_who_declined(failed).values())
    if not reasons:
        return ""
    reason, n_clients = min(reasons.items(), key=lambda one: (-one[1], one[0]))
    most = "" if n_clients == reasons.total() else f", {n_clients} of them with this reason"
    return f"{counted(reasons.total(), 'client')} declined{most}: {reason}"


def _who_failed(failed: Abandoned) -> tuple[ClientId, ...]:
    """The clients that failed an attempt; empty if an operator ended it, or no client was at fault."""
    names = failed.secure.blamed or _who_did_not_report(failed)
    return tuple(sorted(names)) if len(names) <= AVOIDED_MAX else ()


def _who_lied(failed: Abandoned) -> Collection[ClientId]:
    """Clients that broke the protocol in a sum that was unmasked but made no model, and were not merely silent."""
    secure = failed.secure
    return {client for client, why in secure.blamed.items() if not is_late(why)} if secure.was_revealed else ()


def _who_did_not_report(failed: Abandoned) -> Collection[ClientId]:
    """The missing clients of an attempt that failed for lack of reports."""
    roll = Roll(failed.plan, failed.cohort, failed.accepted, failed.missing)
    has_enough = len(failed.accepted) >= failed.plan.minimum
    if has_enough and not (failed.plan.coverage.strict and gaps(roll)):
        return ()
    return failed.missing.keys()
