"""One run under way: the page that drives `umbel.aggregation.round.advance`.

`handle(event)`: advance the state, save it with all that goes with it in one transaction, then carry out the commands
in order. The task that `start` begins supplies what no request does: the gathering of waiting clients, the end of the
window, the commit, the next attempt. After a restart it finds the state where it was saved and goes on from there:
an open window stays open, the sum is made again from the stored updates, a closing round commits the same bits.
"""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import assert_never

from umbel.aggregation.layout import Layout
from umbel.aggregation.messages import ReportAnswer, RunStatus
from umbel.aggregation.records import LiveRound, RunView
from umbel.aggregation.round import (
    Abandoned,
    Answer,
    Applied,
    Closing,
    Command,
    Commit,
    Committed,
    Declined,
    Discard,
    Event,
    Fold,
    Gathered,
    Invite,
    Recruiting,
    Release,
    Reported,
    RoundState,
    Spoiled,
    Stopped,
    Tick,
    Training,
    advance,
    next_deadline,
)
from umbel.aggregation.types import AssignmentId, ClientId, RoundPlan, RunId, assignment_id
from umbel.server import endings, journal
from umbel.server.folding import Folding
from umbel.server.ledger import Book, Member, live_round
from umbel.server.model_files import ModelFiles, next_model
from umbel.server.services import Services
from umbel.server.store import StaleRound
from umbel.server.stored import Answered, RoundEnd, StoredRound, StoredRun, Traffic
from umbel.server.waiting import Bells, WaitingRoom

_log = logging.getLogger(__name__)
PROGRESS_BELL = "progress."  # no client can have this name: slugs hold no dot
_RETRY_S_MAX = 60.0
_SUM_TRIES = 3


class RunDriver:
    """A run's state in memory, always equal to what is stored. One task and any number of requests share it."""

    def __init__(self, services: Services, run: StoredRun, layout: Layout, stored: StoredRound) -> None:
        self.services = services
        self.run = run
        self.layout = layout
        self.bells = Bells()
        self.waiting = WaitingRoom(services.clock)
        self.lock = asyncio.Lock()
        self.members: dict[ClientId, Member] = {}
        self._stored = stored
        self._traffic: dict[AssignmentId, Traffic] = {}
        self._opened_at = services.clock.now()
        self._folding = self._new_folding()
        self._trouble = ""
        self._sums_failed = 0
        self._removing: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def name(self) -> RunId:
        return RunId(self.run.file.name)

    @property
    def state(self) -> RoundState:
        return self._stored.state

    @property
    def plan(self) -> RoundPlan:
        """The plan of the newest attempt."""
        return self.state.closing.plan if isinstance(self.state, Committed) else self.state.plan

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen in this run. A stop lets a round that has closed commit."""
        return self.run.status is not RunStatus.RUNNING and not isinstance(self.state, Closing)

    def assignment_id(self, client: ClientId) -> AssignmentId:
        """This client's assignment in the newest attempt, if it has one."""
        return assignment_id(self.name, self.plan.number, self.plan.attempt, client)

    def open_round(self, client: ClientId) -> Training | None:
        """The round under way, if it still waits for this client."""
        state = self.state
        if not isinstance(state, Training) or self.services.clock.now() >= state.closes_at:
            return None
        is_waited_for = client in state.cohort and client not in state.accepted and client not in state.declined
        return state if is_waited_for else None

    def view(self) -> RunView:
        run, model = self.run, self.run.model
        planned = run.file.rounds.count
        return RunView(run.file.name, run.status, run.reason, model.version, planned, run.created_at, model)

    def live(self) -> LiveRound | None:
        """The round under way, with what is wrong with it, if anything is."""
        live = live_round(self.state, self._book(), len(self.waiting.candidates()), self.services.clock.now())
        return replace(live, why=f"{self._trouble}; {live.why}") if live and self._trouble else live

    # --- its life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take up the newest attempt as it was stored, and begin to drive."""
        await self._resume()
        self._task = asyncio.create_task(self._drive(), name=f"run {self.name}")

    async def close(self) -> None:
        """Stop driving. What is stored stays as it is."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._removing is not None:
            await self._removing
        await self._folding.discard()

    def wake(self) -> None:
        """Something has happened that no event tells: look again."""
        self._woken.set()
        self.bells.ring((PROGRESS_BELL,))

    async def handle(self, event: Event) -> ReportAnswer | None:
        """Let one event happen. Returns what to tell the client if it was a report."""
        async with self.lock:
            return await self.handle_locked(event)

    async def handle_locked(self, event: Event) -> ReportAnswer | None:
        """`handle` for a caller that holds `lock` because it had something to check first."""
        try:
            commands = await self._advance(event)
        except StaleRound:
            _log.warning("run %s: another process has driven this round; taking up its state", self.name)
            await self._resume()
            commands = await self._advance(event)
        return self._carry_out(commands)

    async def stop(self, reason: str) -> None:
        """End the run now: no further round, and an open one is abandoned."""
        async with self.lock:
            if self.run.status is not RunStatus.RUNNING:
                return
            if isinstance(self.state, Closing):
                await self.services.store.set_run_status(self.name, RunStatus.STOPPED, reason)
            self.run = replace(self.run, status=RunStatus.STOPPED, reason=reason)
            await self.handle_locked(Stopped(self.services.clock.now(), reason))
        self.wake()
        self.bells.ring_all()

    def note_traffic(self, client: ClientId, traffic: Traffic) -> None:
        """Count bytes transferred for a client of the cohort; they are stored with whatever is stored next."""
        if (member := self.members.get(client)) is None:
            return
        member.bytes_up += traffic.up
        member.bytes_down += traffic.down
        name = self.assignment_id(client)
        known = self._traffic.get(name, Traffic())
        self._traffic[name] = Traffic(known.up + traffic.up, known.down + traffic.down)

    # --- the page -----------------------------------------------------------------------------------------------------

    async def _drive(self) -> None:
        """What happens by itself. Trouble (a full disk, say) is logged, shown, and tried again ever more slowly."""
        retry_s = 1.0
        while not self.is_over:
            try:
                await self._step()
                self._trouble, retry_s = "", 1.0
            except Exception as error:
                _log.exception("run %s cannot go on; trying again in %.0f s", self.name, retry_s)
                self._trouble = f"the coordinator is in trouble ({type(error).__name__}, see its log)"
                self.bells.ring((PROGRESS_BELL,))
                await self.services.clock.wait(asyncio.Event(), retry_s)
                retry_s = min(2 * retry_s, _RETRY_S_MAX)

    async def _step(self) -> None:
        self._woken.clear()
        state, now = self.state, self.services.clock.now()
        match state:
            case Recruiting():
                await self.handle(Gathered(now, self.waiting.candidates()))
            case Training() if now >= state.closes_at:
                await self.handle(Tick(now))
            case Closing():
                await self._commit(state)
            case Training() | Committed() | Abandoned():
                pass
            case _:
                assert_never(state)
        if self.state.phase == state.phase and not self.is_over:
            await self.services.clock.wait(self._woken, self._pause_s())

    def _pause_s(self) -> float | None:
        """How long nothing can happen by itself; None: until woken."""
        due, now = next_deadline(self.state), self.services.clock.now()
        if isinstance(self.state, Recruiting) and now - self.state.since >= self.plan.patience_s:
            return None  # patience is over: only another client changes anything
        return None if due is None else max(0.001, due - now)

    async def _advance(self, event: Event) -> tuple[Command, ...]:
        """Advance and save. The new state is durable when this returns."""
        before = self.state
        after, commands = advance(before, event)
        if isinstance(after, Abandoned) and not isinstance(before, Abandoned):
            await self._end_abandoned(after, self._answered(commands, event))
            return tuple(command for command in commands if not isinstance(command, Fold))  # that sum is gone
        if isinstance(after, Recruiting):
            self._stored = replace(self._stored, state=after)  # only `why` can have changed: not worth a transaction
        elif after != before:
            await self._save(after, commands, event)
        return commands

    async def _save(self, after: RoundState, commands: tuple[Command, ...], event: Event) -> None:
        invited = self._invited(commands, event)
        answered = self._answered(commands, event)
        declined = [self.assignment_id(event.client)] if isinstance(event, Declined) else []
        traffic, self._traffic = self._traffic, {}
        self._stored = await self.services.store.save_round(
            replace(self._stored, state=after),
            invited=[(self.assignment_id(client), client, member.sample_count) for client, member in invited.items()],
            answered=answered,
            declined=declined,
            traffic=traffic,
        )
        self._note_saved(event, invited, answered)

    def _note_saved(self, event: Event, invited: dict[ClientId, Member], answered: list[Answered]) -> None:
        if invited:
            self.members, self._opened_at = invited, event.now
            journal.round_opened(self.plan, len(invited))
        if isinstance(event, Declined):
            self.members[event.client].is_declined = True
        if isinstance(event, Reported) and answered:
            self.members[event.client].reported_at = event.now
        self.bells.ring((PROGRESS_BELL,))

    def _invited(self, commands: Iterable[Command], event: Event) -> dict[ClientId, Member]:
        if not isinstance(event, Gathered):
            return {}
        counts = {candidate.client: candidate.sample_count for candidate in event.candidates}
        invites = (command for command in commands if isinstance(command, Invite))
        return {client: Member(counts[client]) for invite in invites for client in invite.clients}

    def _answered(self, commands: Iterable[Command], event: Event) -> list[Answered]:
        """The report that this event made count, if it did."""
        if not isinstance(event, Reported):
            return []
        folds = [command.client for command in commands if isinstance(command, Fold)]
        return [
            Answered(self.assignment_id(told.client), ReportAnswer(told.outcome, told.reason), event.work, event.now)
            for told in commands
            if isinstance(told, Answer) and told.client in folds
        ]

    def _carry_out(self, commands: Iterable[Command]) -> ReportAnswer | None:
        """Do what the machine commands. All of it can be done again after a crash, from what is stored."""
        told: ReportAnswer | None = None
        for command in commands:
            match command:
                case Invite(clients=clients):
                    self.waiting.remove(clients)
                    self.bells.ring(clients)
                case Fold(client=client, weight=weight):
                    self._folding.add(self.services.upload_path(self.assignment_id(client)), weight)
                case Answer(outcome=outcome, reason=reason):
                    told = ReportAnswer(outcome, reason)
                case Release(clients=clients):
                    self.bells.ring(clients)
                case Commit() | Discard():
                    self._woken.set()
                case _:
                    assert_never(command)
        return told

    # --- how an attempt ends ------------------------------------------------------------------------------------------

    async def _commit(self, closing: Closing) -> None:
        """Make the next model from the sum, store it, and begin what comes next."""
        try:
            total = await self._folding.total()
            assert total.total_weight == closing.aggregate.total_weight, "the sum is not of the accepted reports"
        except Exception as error:
            await self._retry_sum(error)
            return
        blobs, rate = self.services.blobs, self.run.file.aggregation.server_learning_rate
        try:
            files: ModelFiles = await asyncio.get_running_loop().run_in_executor(
                self.services.worker, next_model, blobs, self.layout, self.run.master_sha256, total, rate
            )
        except ValueError as error:  # the same sum would fail again; a full disk is an OSError, and passes
            await self.handle(Spoiled(self.services.clock.now(), f"no model can be made of the sum: {error}"))
            return
        del total
        async with self.lock:
            await self._end_committed(closing, files)

    async def _retry_sum(self, error: Exception) -> None:
        """After a fold that failed the sum is undefined: make it again from what is stored, but not for ever."""
        self._sums_failed += 1
        if self._sums_failed < _SUM_TRIES:
            await self._refold()
            raise error
        _log.error("run %s: the sum of round %d cannot be made", self.name, self.plan.number, exc_info=error)
        reason = f"an accepted update could not be read again ({type(error).__name__})"
        await self.handle(Spoiled(self.services.clock.now(), reason))

    async def _end_committed(self, closing: Closing, files: ModelFiles) -> None:
        now = self.services.clock.now()
        after, _ = advance(closing, Applied(now, files.published.sha256))
        run, end = endings.committed(self.run, closing, files, self._book(), now)
        await self._end(after, end, run, closing.cohort)

    async def _end_abandoned(self, after: Abandoned, answered: list[Answered]) -> None:
        end = endings.abandoned(self.run, after, answered, self._book(), self.services.clock.now())
        await self._end(after, end, self.run, after.cohort)

    async def _end(self, after: RoundState, end: RoundEnd, run: StoredRun, cohort: Iterable[ClientId]) -> None:
        """Save an attempt's end, then forget its sum and its updates."""
        used = [self.services.upload_path(self.assignment_id(client)) for client in cohort]
        traffic, self._traffic = self._traffic, {}
        now = self.services.clock.now()
        ended = replace(self._stored, state=after)
        begun = await self.services.store.end_round(ended, end, now, traffic)
        journal.round_ended(end.record)
        if run.status is not RunStatus.RUNNING:
            journal.run_over(run.file.name, run.status, run.reason)
        folding, self._folding = self._folding, self._new_folding()
        self.run, self._stored, self.members = run, begun or ended, {}
        self._sums_failed = 0
        self._woken.set()
        self.bells.ring_all()
        await folding.discard()
        self._removing = asyncio.create_task(asyncio.to_thread(_remove, used), name=f"updates of {self.name}")

    # --- what is held in memory only ----------------------------------------------------------------------------------

    async def _resume(self) -> None:
        """Take up the newest attempt from the store: its state, its members, and the sum of what has been accepted."""
        stored = await self.services.store.newest_round(self.name)
        run = await self.services.store.run(self.name)
        assert run is not None, "runs are never deleted"
        self.run, self._stored = run, stored
        self.members = {
            one.client: Member(
                one.sample_count, one.is_declined, one.reported_at, one.bytes_up, one.bytes_down, one.upload
            )
            for one in await self.services.store.assignments(stored.id)
        }
        if isinstance(stored.state, Training | Closing):
            self._opened_at = stored.state.opened_at
        await self._refold()

    async def _refold(self) -> None:
        await self._folding.discard()
        self._folding = self._new_folding()
        if isinstance(self.state, Training | Closing):
            for client, accepted in self.state.accepted.items():
                self._folding.add(self.services.upload_path(self.assignment_id(client)), accepted.weight)

    def _new_folding(self) -> Folding:
        return Folding(self.layout.n_values, self.plan.grid, self.services.worker)

    def _book(self) -> Book:
        opened_at = self.state.since if isinstance(self.state, Recruiting) else self._opened_at
        return Book(self.members, opened_at, self._heard_at)

    def _heard_at(self, client: ClientId) -> float:
        """A client whose request is held open is heard of at this moment."""
        return self.services.clock.now() if self.bells.is_heard(client) else self.services.heard.at(client)


def _remove(paths: Iterable[Path]) -> None:
    """Removing files may take the disk a while. What a crash leaves is swept at the next start."""
    for path in paths:
        path.unlink(missing_ok=True)
