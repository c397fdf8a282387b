"""The window of one attempt at a round in virtual time: reports in the order of their arrival, for the state machine.

Acceptance depends only on arrival time, so the window is played before the training, and only accepted clients train.
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
    """The clients of a cohort by rank, their fates, and the work that each would report."""

    names: Sequence[ClientId]
    fates: Fates
    works: Sequence[Work]


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Seconds that the devices of an attempt were at work, transfers included."""

    busy_s: float = 0.0  # of all devices
    accepted_s: float = 0.0  # of those whose reports were accepted


@dataclass(frozen=True, slots=True)
class Played:
    """An attempt that has ended at `at`."""

    ended: Closing | Abandoned
    at: float
    cohort: Cohort

    def book(self, sizes: Mapping[ClientId, int], declines: Mapping[ClientId, str]) -> Book:
        """What the coordinator knows of its clients. `sizes`: of the written updates."""
        return _book_of(self.ended, self.cohort, sizes, declines)

    @property
    def device_time(self) -> DeviceTime:
        """Counted until a device reported or was told to stop."""
        ended = self.ended
        busy_s = self.cohort.fates.spent(ended.closed_at - ended.opened_at).busy_s
        is_accepted = np.array([name in ended.accepted for name in self.cohort.names], dtype=np.bool_)
        return DeviceTime(float(busy_s.sum()), float(busy_s[is_accepted].sum()))


@dataclass(frozen=True, slots=True)
class Window:
    """The window of a plain attempt. `play` can be called repeatedly; equal arguments give equal results."""

    opened: Training
    cohort: Cohort

    def play(self, declines: Mapping[ClientId, str]) -> Played:
        """From the opening to the end. `declines`: clients that decline when their report would have come, and why."""
        state: RoundState = self.opened
        for event in _events(self.opened, self.cohort, declines):
            state, _ = advance(state, event)
            if not isinstance(state, Training):
                break
        else:
            state, _ = advance(state, Tick(self.opened.closes_at))
        assert isinstance(state, Closing | Abandoned), "a window ends"
        return Played(state, state.closed_at, self.cohort)


def _book_of(
    ended: Closing | Abandoned, cohort: Cohort, sizes: Mapping[ClientId, int], declines: Mapping[ClientId, str]
) -> Book:
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


def _events(opened: Training, cohort: Cohort, declines: Mapping[ClientId, str]) -> Iterable[Event]:
    """In the order of time; at the same moment, the lower rank first."""
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
