"""The window of one attempt at a round in virtual time: reports as they come, through the coordinator's own machine.

Nothing waits, and nobody has trained yet: whose report counts follows from when it comes. So only those train.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from umbel.aggregation.reports import Work
from umbel.aggregation.round.machine import advance
from umbel.aggregation.round.states import Abandoned, Closing, Declined, Event, Reported, RoundState, Tick, Training
from umbel.aggregation.run.ledger import Book, MemberFacts
from umbel.aggregation.types import ClientId
from umbel.sim.fleet.fates import Fates


@dataclass(frozen=True, slots=True)
class Cohort:
    """Who is in it, by rank, and what becomes of each. `works`: what each says in its report, if it comes to that."""

    names: Sequence[ClientId]
    fates: Fates
    works: Sequence[Work]


@dataclass(frozen=True, slots=True)
class Toil:
    """Seconds that the devices of an attempt were at work, lines included: all of them together, and those of them
    whose reports were accepted."""

    busy_s: float = 0.0
    accepted_s: float = 0.0


def play(opened: Training, cohort: Cohort, declines: Mapping[ClientId, str]) -> Closing | Abandoned:
    """The window, from its opening to its end.

    `declines`: who says that nothing will come of it, at the moment at which its report would have come, and why.
    """
    state: RoundState = opened
    for event in _events(opened, cohort, declines):
        state, _ = advance(state, event)
        if not isinstance(state, Training):
            break
    else:
        state, _ = advance(state, Tick(opened.closes_at))
    assert isinstance(state, Closing | Abandoned), "a window ends"
    return state


def book_of(
    ended: Closing | Abandoned, cohort: Cohort, sizes: Mapping[ClientId, int], declines: Mapping[ClientId, str]
) -> Book:
    """What the coordinator would know of its clients. `sizes`: of the updates that were written."""
    open_s = ended.closed_at - ended.opened_at
    fates, members, heard = cohort.fates, dict[ClientId, MemberFacts](), dict[ClientId, float]()
    spent = fates.spent(open_s)
    facts = zip(
        cohort.names,
        fates.report_s.tolist(),
        fates.lost_s.tolist(),
        fates.back_s.tolist(),
        spent.bytes_down.tolist(),
        spent.bytes_up.tolist(),
        strict=True,
    )
    for client, report_s, lost_s, back_s, bytes_down, bytes_up in facts:
        has_reported = client in ended.accepted
        members[client] = MemberFacts(
            ended.cohort[client].sample_count,
            client in declines and not has_reported,
            ended.opened_at + report_s if has_reported else None,
            sizes.get(client, bytes_up) if has_reported else bytes_up,
            bytes_down,
        )
        is_silent = lost_s < min(open_s, report_s) and not back_s < open_s
        heard[client] = ended.opened_at + lost_s if is_silent else ended.closed_at
    return Book(members, ended.opened_at, heard.__getitem__)


def toil_of(ended: Closing | Abandoned, cohort: Cohort) -> Toil:
    """What it cost them, until their reports or until they were told to stop."""
    busy_s = cohort.fates.spent(ended.closed_at - ended.opened_at).busy_s
    is_accepted = np.array([name in ended.accepted for name in cohort.names], dtype=np.bool_)
    return Toil(float(busy_s.sum()), float(busy_s[is_accepted].sum()))


def _events(opened: Training, cohort: Cohort, declines: Mapping[ClientId, str]) -> Iterable[Event]:
    """In the order of time; of two at one moment, first the one of the lower rank."""
    report_s = cohort.fates.report_s
    order = np.argsort(report_s, kind="stable")
    for rank in order[np.isfinite(report_s[order])].tolist():
        client, at = cohort.names[rank], opened.opened_at + float(report_s[rank])
        if at >= opened.closes_at:
            return
        if (why := declines.get(client)) is not None:
            yield Declined(at, client, why)
        else:
            yield Reported(at, client, cohort.works[rank])
