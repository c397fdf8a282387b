"""The mailbox of a run: events and orders as letters, and the batch of them that one transaction decides.

The batch is what `RoundStore.step` asks inside its transaction: each letter is decided on the state that the one before
has left, and answered when all of it is stored.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from umbel.aggregation.audit.bundle import SignedReport
from umbel.aggregation.errors import UpdateRefused
from umbel.aggregation.messages import ReportAnswer, RunStatus
from umbel.aggregation.round.machine import advance, hears, takes
from umbel.aggregation.round.states import (
    Abandoned,
    Answer,
    Applied,
    Closing,
    Command,
    Committed,
    Declined,
    Event,
    Gathered,
    Recruiting,
    Reported,
    RoundState,
    Spoke,
    Training,
)
from umbel.aggregation.run import endings
from umbel.aggregation.run.endings import Upshot
from umbel.aggregation.run.run_end import KeptVersion, RoundEnd
from umbel.aggregation.secagg.turns import Phase
from umbel.aggregation.types import AssignmentId, ClientId
from umbel.server.problems import Refused, shutting_down
from umbel.server.runs.audit_facts import ClientEvidence, Deposition, depose
from umbel.server.runs.chronicle import Chronicle
from umbel.server.runs.orders import Order, Rollback, Situation, obey
from umbel.server.runs.reports import check_report, check_turn
from umbel.server.store.stored import Answered, Change, LiveRun, StoredAssignment, StoredRun, StoredUpload, Traffic


class PastAttempt(Exception):
    """The assignment is of an attempt that is over: what it is told is in the store."""


@dataclass(slots=True, eq=False)
class Letter:
    """An event in the mailbox. `assignment`: the one it speaks of; of another attempt, it has come too late.

    `order`: an operator's, from which the event follows. `made`: what has been made of the closed round, with
    `Applied`, and `deposition`: what is told of its clients. `round_id`: the attempt that it speaks of, where its event
    would mean something else to the next. `signed`: a report as its client signed it. `body`: of a message of a
    secure round, as it came.
    """

    event: Event | None = None
    assignment: AssignmentId | None = None
    order: Order | None = None
    made: Upshot | None = None
    deposition: Deposition | None = None
    round_id: int | None = None
    signed: SignedReport | None = None
    body: bytes | None = None
    told: ReportAnswer | None = None
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batch:
    """The letters of one transaction: decided one after the other on the state that is stored, answered when it is.

    `opened`: how many clients are asked by a round that it has opened, else 0; `why`: why these, if that is to be told.
    """

    def __init__(self, letters: Sequence[Letter], live: LiveRun, chronicle: Chronicle) -> None:
        self.commands: list[Command] = []
        self.opened, self.why = 0, ""
        self.is_abandoned = False
        self.found = live
        self.uploads: Mapping[AssignmentId, StoredUpload] = {}
        self._letters = letters
        self._chronicle = chronicle
        self._n_decided = 0
        self._failed: dict[int, Exception] = {}
        self._recruiting: Recruiting | None = None
        self._status: tuple[RunStatus, str] | None = None
        self.rolled_back_to: KeptVersion | None = None

    @property
    def uploads_of(self) -> Sequence[AssignmentId]:
        return [one.assignment for one in self._letters if isinstance(one.event, Reported) and one.assignment]

    @property
    def reads_history(self) -> bool:
        """Rollbacks go by what versions there are, and so do the ends of rounds that are not abandoned."""
        return any(isinstance(one.order, Rollback) or isinstance(one.event, Applied) for one in self._letters)

    def decide(
        self, live: LiveRun, uploads: Mapping[AssignmentId, StoredUpload], history: Sequence[KeptVersion]
    ) -> Change:
        self.found, self.uploads = live, uploads
        state, self._status = live.state, None
        answered: list[Answered] = []
        sealed: list[tuple[AssignmentId, bytes]] = []
        traffic = Traffic()
        for letter in self._letters:
            self._n_decided += 1
            before = state
            try:
                state, commands = self._decide_one(live, state, letter, history)
            except (Refused, UpdateRefused, PastAttempt) as refusal:
                self._failed[self._n_decided - 1] = refusal
                continue
            self.commands += commands
            answered += _answered(live, before, commands, letter)
            if isinstance(letter.event, Spoke) and letter.body is not None and hears(before, letter.event):
                assignment = live.assignment_id(letter.event.client)
                traffic.up[assignment] += len(letter.body)
                if letter.event.turn is Phase.SHARE_KEYS:
                    sealed.append((assignment, letter.body))
            if isinstance(state, Abandoned | Committed) and type(state) is not type(before):
                self.is_abandoned = isinstance(state, Abandoned)
                break
        if isinstance(state, Recruiting) and isinstance(live.state, Recruiting) and state.since == live.state.since:
            self._recruiting, state = state, live.state  # only `why` can have changed: not worth a write
        if isinstance(state, Training) and isinstance(live.state, Recruiting):
            self.opened, self.why = len(state.cohort), state.secure.why if state.secure else ""
        return Change(state, tuple(answered), self._status, self._who_declined(live, state), tuple(sealed), traffic)

    def _decide_one(
        self, live: LiveRun, state: RoundState, letter: Letter, history: Sequence[KeptVersion]
    ) -> tuple[RoundState, tuple[Command, ...]]:
        event, status = letter.event, self._status[0] if self._status else live.run.status
        if letter.order is not None:
            obeyed = obey(letter.order, Situation(live.run.file, status, state, history))
            event, self.rolled_back_to = obeyed.event, obeyed.rolled_back_to
            self._status = obeyed.status or self._status
        if letter.assignment is not None:
            assert isinstance(event, Reported | Declined | Spoke)
            if live.assignment_id(event.client) != letter.assignment:
                raise PastAttempt
            if isinstance(event, Reported) and takes(state, event):
                check_report(state, event, self.uploads.get(letter.assignment))
            if isinstance(event, Spoke):
                check_turn(state, event)
        if letter.round_id not in (None, live.round_id):
            return state, ()  # another replica was faster, and what it made is already the base of the next
        if event is None or (isinstance(event, Gathered) and status is RunStatus.PAUSED):
            return state, ()
        return advance(state, event)

    @property
    def deposition(self) -> Deposition | None:
        """Of a round that commits; where it is abandoned instead, other things are told of its clients."""
        return None if self.is_abandoned else self._letters[self._n_decided - 1].deposition

    def depose(
        self,
        state: Abandoned | Committed,
        assignments: Sequence[StoredAssignment],
        evidence: Mapping[ClientId, ClientEvidence],
    ) -> Deposition:
        ended = state.closing if isinstance(state, Committed) else state
        return depose(ended, self._chronicle.book(self.found.state, assignments), evidence)

    def end(
        self, run: StoredRun, state: Abandoned | Committed, deposition: Deposition, history: Sequence[KeptVersion]
    ) -> RoundEnd:
        end = self._ending(run, state, deposition, history)
        absent = self._chronicle.roll.absent_from(self.found.round_id)
        return replace(end, record=replace(end.record, absent=absent))

    def _ending(
        self, run: StoredRun, state: Abandoned | Committed, deposition: Deposition, history: Sequence[KeptVersion]
    ) -> RoundEnd:
        letters = self._letters[: self._n_decided]
        known = self._chronicle.known(run, deposition, history)
        if isinstance(state, Abandoned):
            if self.rolled_back_to is not None:
                return endings.rolled_back(run, state, self.rolled_back_to, known)
            return endings.abandoned(run, state, known, by_order=letters[-1].order is not None)
        made = letters[-1].made
        assert made is not None, "a round commits with what was made of it"
        return endings.finished(run, state.closing, made, known)

    def _who_declined(self, live: LiveRun, state: RoundState) -> tuple[ClientId, ...]:
        """Whose declining has closed the round, or came with what did: of those the state knows only that they miss."""
        if not isinstance(live.state, Training) or not isinstance(state, Closing | Abandoned):
            return ()
        events = [one.event for one in self._letters[: self._n_decided]]
        named = {one.client for one in events if isinstance(one, Declined)}
        return tuple(sorted(named & state.missing.keys()))

    def shown(self, live: LiveRun) -> LiveRun:
        """The run as this replica shows it: while recruiting, with what it waits for."""
        if self._recruiting is not None and live.state is self.found.state:
            return replace(live, state=self._recruiting)
        return live

    def settle(self) -> None:
        """Answer the letters that were decided."""
        for index, letter in enumerate(self._letters[: self._n_decided]):
            if letter.done.done():
                continue  # its request was cancelled
            if (refusal := self._failed.get(index)) is not None:
                letter.done.set_exception(refusal)
            else:
                letter.done.set_result(None)

    def left(self) -> list[Letter]:
        """The letters that came after the attempt had ended: they are for the next."""
        return list(self._letters[self._n_decided :])


def _answered(live: LiveRun, before: RoundState, commands: Sequence[Command], letter: Letter) -> list[Answered]:
    """Note what a report is told; and, if it is this that made it count, that it does."""
    event = letter.event
    if not isinstance(event, Reported):
        return []
    told = next(one for one in commands if isinstance(one, Answer) and one.client == event.client)
    letter.told = ReportAnswer(told.outcome, told.reason)
    if not takes(before, event):
        return []
    return [Answered(event.client, live.assignment_id(event.client), letter.told, event.now, letter.signed)]


def fail(letters: Sequence[Letter], error: BaseException) -> None:
    """The transaction has failed, so nothing has happened; every one of them may come again."""
    for letter in letters:
        if not letter.done.done():
            letter.done.set_exception(error if isinstance(error, Exception) else shutting_down())
            letter.done.exception()  # it need not be looked at: the request may be gone
