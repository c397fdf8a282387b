"""What a replica remembers of a run beside its state, and how it shows the run to operators.

It remembers when clients were last seen, report times and waiting clients. Round records, self-tuning and the pace of
check-ins use this. No decision needs it: a replica that has just started knows less. Each record of an ended attempt is
read once, whichever replica ended the attempt.
"""

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.privacy.section import PrivacySpent, spent_after
from umbel.aggregation.round.states import Abandoned, Closing, Committed, Recruiting, RoundState, Training
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.run.endings import Known
from umbel.aggregation.run.ledger import Book, MemberFacts, live_round
from umbel.aggregation.run.records import LiveRound, RoundRecord, RunView
from umbel.aggregation.run.report_times import Observation, observed
from umbel.aggregation.run.run_end import KeptVersion
from umbel.aggregation.run.tuning import OBSERVATIONS_MAX, TuningFacts
from umbel.aggregation.types import ClientId
from umbel.server.devices.clients import AttendanceCheck
from umbel.server.devices.waiting import Bells, Pacing, WaitingRoom
from umbel.server.runs.bundle_facts import AttemptClients, attempt_clients
from umbel.server.services import Services
from umbel.server.store.stored import LiveRun, StoredAssignment, StoredRecord, StoredRun

_FIRST_LOOK, _NEXT_LOOK, _GROWTH, _ATTEMPTS_MAX = 4, 8, 4, 4096
PROGRESS_BELL = "progress."  # never a client's name, which has no dot
LOOK_S = 0.5  # least time between two readings of a round that changes all the time


class RunMemory:
    """`pacing`: when clients without work should come back. `attendance`: the clients that missed the newest round."""

    def __init__(self, services: Services, live: LiveRun, bells: Bells) -> None:
        limit = services.settings.check_ins_per_s_max
        self.pacing = Pacing(live.name, live.run.salt, services.waiters, services.clock, limit)
        self.attendance = AttendanceCheck(services.waiters)
        self._report_times = ReportTimes()
        self._last_round_id = 0
        self._run = live.name
        self._services = services
        self._bells = bells
        self._tiers: Counter[str] = Counter()

    async def start(self) -> None:
        """Read the newest stored records."""
        rounds = self._services.rounds
        for stored in await enough_of(lambda count: rounds.newest_ended(self._run, count)):
            self.note(stored)
        await self.pacing.look()

    async def look(self) -> None:
        """Read the records of attempts that other replicas have ended."""
        for stored in await self._services.rounds.newest_ended(self._run, _NEXT_LOOK, self._last_round_id):
            self.note(stored)

    def note(self, stored: StoredRecord) -> None:
        """Remember the record of an ended attempt, once."""
        if stored.round_id <= self._last_round_id:
            return
        self._last_round_id = stored.round_id
        self.pacing.note(stored.record)
        self._report_times.note(stored.record)

    def note_waiting(self, candidates: Sequence[Candidate]) -> None:
        """Count the waiting clients by tier."""
        self._tiers = Counter(candidate.tier for candidate in candidates)

    async def clients(self, live: LiveRun) -> AttemptClients:
        """Describe the clients of a closed round, before the step that ends it."""
        closing = live.state
        assert isinstance(closing, Closing)
        await self.attendance.check(live, self._services.clock.now())
        assignments, evidence = await self._services.rounds.clients_of(live.round_id)
        return await asyncio.to_thread(lambda: attempt_clients(closing, self.book(live, assignments), evidence))

    def known(self, run: StoredRun, clients: AttemptClients, history: Sequence[KeptVersion]) -> Known:
        """The facts, beside the attempt itself, that decide how it ends."""
        evidence = self._report_times.evidence(run.model.size_bytes, self.pacing.population, self._tiers)
        return Known(clients.records, clients.opened_at, self._services.clock.now(), history, evidence)

    def book(self, live: LiveRun, assignments: Sequence[StoredAssignment]) -> Book:
        """What is known of the clients of the newest attempt."""
        members = {
            one.client: MemberFacts(one.sample_count, one.is_declined, one.reported_at, one.bytes_up, one.bytes_down)
            for one in assignments
        }
        seen = {one.client: one.heard_at for one in assignments}
        opened_at, keeps_metrics = _opened_at(live.state), live.run.file.retention.per_site_metrics
        return Book(members, opened_at, lambda client: self._seen_at(client, seen[client]), keeps_metrics)

    def _seen_at(self, client: ClientId, stored: float) -> float:
        """When the client was last seen. A client whose request is held open is seen now."""
        if self._bells.is_heard(client):
            return self._services.clock.now()
        return max(stored, self._services.heard.at(client))


class ReportTimes:
    """The newest `OBSERVATIONS_MAX` report times of one run, by attempt, for self-tuning."""

    def __init__(self) -> None:
        self._attempts: deque[tuple[Observation, ...]] = deque()
        self._count = 0

    def note(self, record: RoundRecord) -> None:
        """Add an ended attempt. The newest attempt is kept even if it alone is over the limit."""
        if not (shown := observed(record)):
            return
        self._attempts.append(shown)
        self._count += len(shown)
        while self._count > OBSERVATIONS_MAX and len(self._attempts) > 1:
            self._count -= len(self._attempts.popleft())

    def evidence(self, model_bytes: int, population: int | None, waiting: Mapping[str, int]) -> TuningFacts:
        """What is known now. `population`: distinct clients seen within a day; `waiting`: waiting clients by tier."""
        observations = tuple(one for shown in self._attempts for one in shown)
        return TuningFacts(observations, model_bytes, population, waiting)


async def enough_of(newest: Callable[[int], Awaitable[Sequence[StoredRecord]]]) -> Sequence[StoredRecord]:
    """Read enough of the newest records for `OBSERVATIONS_MAX` clients, and few more, because they may be large."""
    n_wanted = _FIRST_LOOK
    while True:
        found = await newest(n_wanted)
        n_clients = sum(len(stored.record.clients) for stored in found)
        if len(found) < n_wanted or n_clients >= OBSERVATIONS_MAX or n_wanted >= _ATTEMPTS_MAX:
            return found
        n_wanted *= _GROWTH


def _opened_at(state: RoundState) -> float:
    match state:
        case Recruiting(since=since):
            return since
        case Training(opened_at=opened_at) | Closing(opened_at=opened_at):
            return opened_at
        case Committed(closing=closing):
            return closing.opened_at
        case Abandoned(closed_at=closed_at):  # of a run that is over; nothing uses it
            return closed_at
        case _:
            assert_never(state)


def view_of(live: LiveRun) -> RunView:
    """An overview of the run."""
    run = live.run
    done, planned = live.rounds_done, run.file.rounds.count
    view = RunView(run.file.name, run.status, run.reason, done, planned, run.created_at, run.model, run.audit_sha256)
    return replace(view, privacy=_spent(live), members_sha256=run.file.members_sha256)


def _spent(live: LiveRun) -> PrivacySpent | None:
    """What a private run has spent so far; None for other runs."""
    file, noise = live.run.file, live.plan.noise
    return spent_after(file.privacy, noise, live.n_released, file.rounds.count) if file.privacy and noise else None


class RunNow:
    """The open round of a run. One reading serves all requests that came before it began."""

    def __init__(
        self, services: Services, memory: RunMemory, waiting: WaitingRoom, bells: Bells, seen: Callable[[], LiveRun]
    ) -> None:
        """`seen`: returns the run as this replica has it."""
        self.trouble = ""  # why the run cannot continue; empty if it can
        self._bells = bells
        self._made_as = secrets.token_hex(4)
        self._n_changes = 0
        self._services = services
        self._memory = memory
        self._waiting = waiting
        self._seen = seen
        self._reading = asyncio.Lock()
        self._n_begun = self._newest = 0  # number of readings begun; number of the newest that succeeded
        self._read_at = float("-inf")
        self._found: LiveRound | None = None

    @property
    def mark(self) -> str:
        """A mark for `has_changed_since`: it names this replica and counts its changes."""
        return f"{self._made_as}.{self._n_changes}"

    def has_changed_since(self, mark: str) -> bool:
        """False for another replica's mark, because what that replica has shown is not known here."""
        return mark != self.mark and mark.partition(".")[0] == self._made_as

    def changed(self) -> None:
        """Wake the requests that wait for a change."""
        self._n_changes += 1
        self._bells.ring((PROGRESS_BELL,))

    async def look(self) -> LiveRound | None:
        """The open round, read after this call began; None once it has ended."""
        asked_after = self._n_begun
        async with self._reading:
            if self._newest <= asked_after:
                self._n_begun += 1
                self._read_at = self._services.clock.now()
                self._found = await self._read()
                self._newest = self._n_begun
            return self._found

    async def let_changes_gather(self) -> None:
        """Wait until the last reading is `LOOK_S` ago. Requests that wait for changes call this before each reading."""
        left_s = self._read_at + LOOK_S - self._services.clock.now()
        if left_s > 0:
            await self._services.clock.wait(asyncio.Event(), min(left_s, LOOK_S))

    async def _read(self) -> LiveRound | None:
        live, clock = self._seen(), self._services.clock
        is_recruiting = isinstance(live.state, Recruiting)
        n_waiting = len(await self._waiting.candidates()) if is_recruiting else 0
        assignments = await self._services.rounds.assignments(live.round_id)
        await self._memory.attendance.check(live, clock.now())
        book = self._memory.book(live, assignments)
        found = await asyncio.to_thread(live_round, live.state, book, n_waiting, clock.now())
        if found and is_recruiting and live.run.status is RunStatus.PAUSED:
            found = replace(found, why=f"the run is paused: {live.run.reason}")
        if found and not is_recruiting:
            found = replace(found, absent=self._memory.attendance.absent_from(live.round_id))
        return replace(found, why=f"{self.trouble}; {found.why}") if found and self.trouble else found
