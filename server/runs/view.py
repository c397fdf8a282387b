"""A run as operators see it: an overview, and the open round with each of its clients."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.privacy.section import PrivacySpent, spent_after
from umbel.aggregation.round.states import Recruiting
from umbel.aggregation.run.ledger import live_round
from umbel.aggregation.run.records import LiveRound, RunView
from umbel.server.devices.waiting import Bells, WaitingRoom
from umbel.server.runs.memory import RunMemory
from umbel.server.services import Services
from umbel.server.store.stored import LiveRun

PROGRESS_BELL = "progress."  # never a client's name, which has no dot
LOOK_S = 0.5  # least time between two readings of a round that changes all the time


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
        book = self._memory.book(live.state, assignments)
        found = await asyncio.to_thread(live_round, live.state, book, n_waiting, clock.now())
        if found and is_recruiting and live.run.status is RunStatus.PAUSED:
            found = replace(found, why=f"the run is paused: {live.run.reason}")
        if found and not is_recruiting:
            found = replace(found, absent=self._memory.attendance.absent_from(live.round_id))
        return replace(found, why=f"{self.trouble}; {found.why}") if found and self.trouble else found
