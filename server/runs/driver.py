"""Drives one run: one transaction for all waiting inputs (`step.py`), then the commands that follow from it.

A task supplies the inputs that no request causes: waiting clients, the end of the window, the result of a closed round
(`closing.py`). After a restart the driver continues from the stored state. Every replica has a driver for every run,
and each of them may move the run.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, assert_never

from umbel.aggregation.messages import ReportAnswer, RunStatus
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.round.cohort import too_few
from umbel.aggregation.round.machine import advance, awaited, next_deadline
from umbel.aggregation.round.silence import cut_s
from umbel.aggregation.round.states import (
    Abandoned,
    Announce,
    Answer,
    Applied,
    Closing,
    Command,
    Commit,
    Committed,
    Discard,
    Fold,
    Gathered,
    Invite,
    Outage,
    Recruiting,
    Release,
    RoundState,
    Silent,
    Spoiled,
    Tick,
    Training,
)
from umbel.aggregation.run.endings import model_after
from umbel.aggregation.secagg.turns import RANDOM_BYTES, Phase
from umbel.aggregation.types import AssignmentId, ClientId, RunId
from umbel.server import journal
from umbel.server.devices.fitness import RunMembers
from umbel.server.devices.signs_of_life import SignsOfLife
from umbel.server.devices.waiting import Bells, Heard, Pacing, WaitingRoom
from umbel.server.runs.assignments import Assignments
from umbel.server.runs.decision import Happening, Made, RunInput, exchange_of
from umbel.server.runs.expected import ExpectedClients
from umbel.server.runs.memory import RunMemory, RunNow
from umbel.server.runs.orders import Order
from umbel.server.runs.step import Answers, Mailbox, Step, take_step
from umbel.server.services import Services
from umbel.server.stopping import stopped
from umbel.server.store.outage import DatabaseAway
from umbel.server.store.stored import Ended, LiveRun, StoredRecord, StoredRun, Traffic
from umbel.server.sums.secure import SecureRounds
from umbel.server.sums.torch_import import torch_imported
from umbel.server.sums.updates import RoundCodec

if TYPE_CHECKING:  # it imports torch, which takes seconds: a coordinator listens before that
    from umbel.server.sums.closing import Closer

_log = logging.getLogger(__name__)
_RETRY_S_MAX = 60.0
_DATABASE_RETRY_S = 1.0
_GATHERING_SHARE = 20  # after listing the waiting clients, the task pauses 20 times as long as that took
_GATHERING_PAUSE_S_MAX = 1.0
_WATCH_S = 0.1  # between looks at whether the replica that closes the round is still alive
_RELAY_S = 0.25  # between looks at the shares that other replicas have received
HEARD_ELSEWHERE_S = 120.0
"""How old a client's time of last contact in the database must be. A replica stores it every 30 s, with requests that
it admits, and a client renews a request that is held open every 30 s at most."""
_FEW = 200  # listing this many waiting clients takes no noticeable time


class RunDriver:
    """One run at this replica."""

    def __init__(
        self, services: Services, live: LiveRun, layout: Layout, status_changed: Callable[[], None] = lambda: None
    ) -> None:
        """`status_changed`: called when the run's status changes, and when the run is over."""
        self.services = services
        self._status_changed = status_changed
        self.live = live  # the run as it was stored when this replica last looked
        self.layout = layout
        self.asked_at = float("-inf")  # when a request last asked for this run
        self.bells = Bells()
        self.waiting = WaitingRoom(live.name, services.waiters, services.clock)
        self.members = RunMembers(services.member_lists, live.run.file, services.clock)
        self.memory = RunMemory(services, live, self.bells)
        self.now = RunNow(services, self.memory, self.waiting, self.bells, lambda: self.live)
        self.codec = RoundCodec(layout)
        self.assignments = Assignments(services, self.codec)
        self.secure = SecureRounds(services, self.assignments.of)
        self.heard = Heard(services.clock)  # of clients about this run
        self._expected = ExpectedClients(services, live.run.file, self.members, self.bells, self.heard)
        self._mailbox = Mailbox(live.name, self._step, self._look_again)
        self._traffic = Traffic()
        self._flushing = asyncio.Lock()
        self._n_gathered = 0
        self._outage: Outage | None = None  # one that no step has counted yet
        self.signs = SignsOfLife(services.heard, services.clock, self._look_for_silence)
        self._heard_elsewhere_at = float("-inf")  # when other replicas last heard a client that is silent here
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # --- its state ----------------------------------------------------------------------------------------------------

    @property
    def name(self) -> RunId:
        return self.live.name

    @property
    def run(self) -> StoredRun:
        return self.live.run

    @property
    def state(self) -> RoundState:
        return self.live.state

    @property
    def plan(self) -> RoundPlan:
        return self.live.plan

    @property
    def _has_closer(self) -> bool:
        """Whether a round has been open here. If not, there is no sum, and no need of torch."""
        return "_closer" in self.__dict__

    async def _forget(self) -> None:
        """Drop the sum of an attempt that is over, and what clients have revealed of it."""
        self.secure.forget()
        if self._has_closer:
            await self._closer.forget()

    @cached_property
    def _closer(self) -> "Closer":
        from umbel.server.sums.closing import Closer  # it imports torch

        return Closer(self.services, self.layout, self.codec, self.secure)

    @property
    def pacing(self) -> Pacing:
        return self.memory.pacing

    @property
    def is_over(self) -> bool:
        """Whether the run has ended. After a stop, a round that has closed still commits."""
        return self.run.status.is_over and not isinstance(self.state, Closing)

    @property
    def is_paused(self) -> bool:
        """Whether no new round begins until an operator resumes the run. An open round continues."""
        return self.run.status is RunStatus.PAUSED

    def assignment_id(self, client: ClientId) -> AssignmentId:
        return self.live.assignment_id(client)

    def knows(self, client: ClientId, assignment: AssignmentId) -> bool:
        return self.live.knows(client, assignment)

    def open_round(self, client: ClientId) -> Training | None:
        return self.live.open_round(client, self.services.clock.now())

    # --- its life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Continue the newest attempt from its stored state."""
        await self.memory.start()
        await self._take_up()
        self._task = asyncio.create_task(self._drive(), name=f"run {self.name}")

    async def close(self) -> None:
        """Stop driving, after a transaction that has begun.

        A cancelled transaction would leave SQLite locked until its connection is garbage-collected.
        """
        if self._task is not None:
            await stopped(self._task)
        await self._mailbox.close()
        await self._forget()
        if self._has_closer:
            await self._closer.settle()
        with suppress(DatabaseAway):  # at most a second's counts are lost
            await self.flush_traffic()

    def wake(self) -> None:
        """Make the task look again, after a change that is no input."""
        self._woken.set()
        self.now.changed()

    async def submit(self, given: RunInput) -> ReportAnswer | None:
        """Take an input in the next step; return the answer to a report. The step is durable on return.

        Raises `Refused` or an `UpdateRefused` for an input that cannot count, and `PastAttempt`.
        """
        return await self._mailbox.submit(given)

    async def catch_up(self) -> None:
        """Load what other replicas have done."""
        async with self._mailbox.moving:
            before, after = self.live, await self.services.rounds.refresh(self.live)
            if after is not before:
                self.live = after
                await self._noticed(before, after)

    async def obey(self, order: Order) -> None:
        """Carry out an operator's order. It is durable on return. Raises `Refused` if the run cannot follow it."""
        await self.submit(order)
        self.wake()
        self.bells.ring_all()

    async def was_away(self, outage: Outage) -> None:
        """Count no time of this outage in the round's window."""
        self._outage = outage
        await self.submit(Happening())

    def note_download(self, client: ClientId, n_bytes: int) -> None:
        """Count bytes that a client of the cohort downloaded. `flush_traffic` stores the counts."""
        if isinstance(self.state, Training) and client in self.state.cohort:
            self._traffic.down[self.assignment_id(client)] += n_bytes

    def note_message(self, assignment: AssignmentId, *, up: int = 0, down: int = 0) -> None:
        """Count bytes of a secure round's messages that no step counts."""
        self._traffic.up[assignment] += up
        self._traffic.down[assignment] += down

    async def flush_traffic(self) -> None:
        """Store all counts, also those that another call has begun to store.

        A cancelled caller does not stop it, because counts that are rolled back would be lost.
        """
        await asyncio.shield(self._store_traffic())

    async def _store_traffic(self) -> None:
        async with self._flushing:
            traffic, self._traffic = self._traffic, Traffic()
            await self.services.rounds.add_traffic(self.name, traffic)

    # --- its task -----------------------------------------------------------------------------------------------------

    async def _drive(self) -> None:
        """Do what is due until the run is over. After an error, such as a full disk, try again with back-off."""
        retry_s = 1.0
        while not self.is_over:
            try:
                await self._act()
                self.now.trouble, retry_s = "", 1.0
            except DatabaseAway:  # the database logs it, once
                self._show_trouble("the database does not answer")
                await self.services.clock.wait(asyncio.Event(), _DATABASE_RETRY_S)
            except Exception as error:
                _log.exception("run %s cannot continue; trying again in %.0f s", self.name, retry_s)
                self._show_trouble(
                    f"the run cannot continue at the moment ({type(error).__name__}; see the coordinator's log)"
                )
                await self.services.clock.wait(asyncio.Event(), retry_s)
                retry_s = min(2 * retry_s, _RETRY_S_MAX)

    def _show_trouble(self, words: str) -> None:
        self.now.trouble = words
        self.now.changed()

    async def _act(self) -> None:
        """Do what is due, then sleep until something may be due."""
        self._woken.clear()
        await torch_imported()  # a round that opens needs it, and one that is open
        before, began = self.live, self.services.clock.now()
        await self._adopt_orphans()
        await self.memory.attendance.check(self.live, began)
        match self.state:
            case Recruiting() if not self.is_paused:
                await self._gather(self.state, began)
            case Training() | Closing() if self._is_due(began) and await self._may_end(self.live):
                live = self.live
                await self.flush_traffic()  # the tick may abandon the attempt
                await self.submit(Happening(Tick(began, self.secure.revealed(live)), live.round_id))
            case Training() if began >= self._silent_at():
                await self._end_the_wait(self.state, began)
            case Closing():
                await self._close_round()
            case Recruiting() | Training() | Committed() | Abandoned():
                pass
            case _:
                assert_never(self.state)
        if self.state.phase == before.state.phase and self.live.round_id == before.round_id and not self.is_over:
            if isinstance(self.state, Recruiting) and self._n_gathered > _FEW:
                took_s = self.services.clock.now() - began
                await asyncio.sleep(min(_GATHERING_SHARE * max(took_s, 0.0), _GATHERING_PAUSE_S_MAX))
            await self.services.clock.wait(self._woken, self._pause_s(began))

    def _is_due(self, now: float) -> bool:
        due = next_deadline(self.state)
        return due is not None and now >= due

    async def _may_end(self, live: LiveRun) -> bool:
        """Whether this replica may end the phase. Only the replica that unmasks may end the phase of unmasking."""
        is_unmasking = isinstance(live.state, Closing) and live.state.is_unmasking
        return not is_unmasking or await self._closer.leads(live)

    async def _gather(self, state: Recruiting, now: float) -> None:
        """List the waiting clients, and take a step if that changes more than the text of what the round waits for.

        If the last list was long and there are still too few clients, they are counted, not listed.
        """
        plan = state.plan
        if (
            self._n_gathered > _FEW
            and not plan.task.may_be_left_out
            and (n := await self.waiting.count()) < plan.minimum
        ):
            self._show_waiting(state, replace(state, why=too_few(plan, n)))
            return
        candidates = await self.waiting.candidates()
        self._n_gathered = len(candidates)
        self.memory.note_waiting(candidates)
        random, removed = os.urandom(RANDOM_BYTES) if plan.secure else b"", await self._removed(state)
        expected = await self._expected.of(self.live.round_id, state, candidates, now)
        gathered = Gathered(now, candidates, random, removed, expected)
        after, _ = advance(state, gathered)
        if not (isinstance(after, Recruiting) and after.since == state.since and self._show_waiting(state, after)):
            await self.submit(Happening(gathered))

    async def _removed(self, state: Recruiting) -> frozenset[ClientId]:
        """The removed clients among those of sums that were unmasked without effect."""
        opened = state.before.opened if state.before else ()
        names = sorted({name for one in opened for name in one.clients})
        found = await asyncio.gather(*(self.services.registry.client(name) for name in names))
        return frozenset(name for name, client in zip(names, found, strict=True) if client is None)

    def _show_waiting(self, before: Recruiting, after: Recruiting) -> bool:
        """Show what the round waits for. Returns False if the run has moved on since `before`."""
        if self.state is not before:
            return False
        self.live = replace(self.live, state=after)
        return True

    def _pause_s(self, looked_at: float) -> float | None:
        """How long to sleep after the look at `looked_at`; None: until woken."""
        if isinstance(self.state, Closing) and not self._waits_for_clients:
            return _WATCH_S
        if isinstance(self.state, Closing) and not self.services.replicas.is_alone:
            return _RELAY_S
        due = next_deadline(self.state, looked_at)
        if due is None or looked_at >= due or (self.is_paused and isinstance(self.state, Recruiting)):
            return None  # its deadline has passed: only another client changes anything
        if (silent_at := self._silent_at()) > looked_at:
            due = min(due, silent_at)
        return max(0.001, due - self.services.clock.now())

    # --- silent clients -----------------------------------------------------------------------------------------------

    def _look_for_silence(self) -> None:
        """Wake the task if the round may wait only for clients of which nothing is heard."""
        if isinstance(self.state, Training) and self._may_be_silent(self.state):
            self._woken.set()

    def _may_be_silent(self, state: Training) -> bool:
        """Whether all clients that the round waits for may be away: a quick look, before each of them is looked at."""
        n_awaited = 1 if state.keys else state.n_open
        return 0 < n_awaited <= self.signs.n_away

    def _silent_at(self) -> float:
        """When all clients that the round waits for will be silent, if nothing more is heard of them; else inf."""
        state = self.state
        if not isinstance(state, Training) or not self._may_be_silent(state):
            return float("inf")
        window_s, now = state.plan.window_s, self.services.clock.now()
        if (keys := state.keys) and now < (looked_at := keys.began_at + cut_s(window_s)):
            return looked_at  # most phases of keys are over by then, and each look is at every client
        times = (self.signs.silent_at(client, window_s, state.back_at) for client in awaited(state))
        return max(max(times, default=float("inf")), self._heard_elsewhere_at + HEARD_ELSEWHERE_S)

    async def _end_the_wait(self, state: Training, now: float) -> None:
        """Go on without silent clients if the round waits only for them, and no other replica may have heard of one."""
        absent, live = awaited(state), self.live
        silent = Silent(now, frozenset(absent))
        if advance(state, silent)[0] is state:
            return  # it needs more reports or messages
        if not self.services.replicas.is_alone:
            found = await self.services.rounds.assignments(live.round_id)
            self._heard_elsewhere_at = max(one.heard_at for one in found if one.client in silent.clients)
            if now < self._heard_elsewhere_at + HEARD_ELSEWHERE_S:
                self._woken.set()
                return
        await self.flush_traffic()
        await self.submit(Happening(silent, live.round_id))
        self.signs.left_behind(absent, state.plan.window_s)

    @property
    def _waits_for_clients(self) -> bool:
        """Whether the round is secure and has closed, so that it may still wait for messages."""
        return isinstance(self.state, Closing) and self.state.plan.is_secure

    async def _step(self, inputs: Sequence[RunInput]) -> Answers:
        """Take one step and carry out its commands. Returns an answer to each input that the step took."""
        outage = self._outage or await self.services.uptime.outage()
        first = [] if outage is None else [Happening(outage)]  # first, so that the window is right for the other inputs
        step = await take_step(self.services, self.memory, self.live, [*first, *inputs])
        before = self.live
        if self._outage is outage:  # else another outage has ended since
            self._outage = None
        self.live = step.shown
        await self._noticed(before, step.before)
        await self._carry_out(step)
        self._look_for_silence()
        if self.live.run.status is not before.run.status:
            self._status_changed()
        return step.decision.answers[len(first) :]

    def _look_again(self) -> None:
        """Wake all who wait, because a step that failed may still be stored."""
        self.wake()
        self.bells.ring_all()

    async def _noticed(self, before: LiveRun, after: LiveRun) -> None:
        """React to steps of other replicas: wake the clients concerned, and drop the sum of an attempt that ended."""
        if after is before:
            return
        if after.round_id != before.round_id or isinstance(after.state, Committed | Abandoned):
            await self._forget()
            await self.memory.look()
            self.bells.ring_all()
        elif _turn(after.state) != _turn(before.state) and not isinstance(after.state, Recruiting):
            cohort = after.state.closing.cohort if isinstance(after.state, Committed) else after.state.cohort
            self.bells.ring(cohort)
        self.wake()
        if after.run.status is not before.run.status:
            self.bells.ring_all()
            self._status_changed()

    async def _carry_out(self, step: Step) -> None:
        """Carry out the machine's commands. After a crash they are carried out again from the stored state."""
        if (opened := step.decision.opened) is not None:
            why = opened.secure.why if opened.secure else ""
            journal.round_opened(self.plan, len(opened.cohort), why)
        for command in step.decision.commands:
            await self.carry_out(command, step)
        if step.ended is not None:
            await self._ended(step.before, step.ended)
        if step.decision.commands:
            self.now.changed()

    async def carry_out(self, command: Command, step: Step) -> None:
        """Carry out one command, after its event is durable."""
        match command:
            case Invite(clients=clients) | Release(clients=clients) | Announce(clients=clients):
                self.bells.ring(clients)
            case Fold(client=client, weight=weight):
                if not isinstance(step.decision.ended, Abandoned):
                    upload = step.decision.uploads[step.before.assignment_id(client)]
                    await torch_imported()
                    self._closer.share.fold(step.before, client, upload.chunks, weight)
            case Answer(client=client):
                self.signs.reported(client)  # the mailbox answers after all other commands
            case Commit() | Discard():
                self._woken.set()
            case _:
                assert_never(command)

    # --- the end of an attempt ----------------------------------------------------------------------------------------

    async def _close_round(self) -> None:
        """Make the result of the closed round, unless another replica is making it."""
        from umbel.server.sums.closing import NothingMade  # it imports torch

        live, now = self.live, self.services.clock.now
        if not self.services.replicas.is_alone:
            await self.flush_traffic()  # another replica may end the round as soon as it has this share
        try:
            made = await self._closer.close(live)
        except NothingMade as failed:
            await self.flush_traffic()
            await self.submit(Happening(Spoiled(now(), str(failed), failed.blamed), live.round_id))
            return
        if made is not None and self.live.round_id == live.round_id:
            await self.flush_traffic()
            clients = await self.memory.clients(live)
            await self.submit(Made(Applied(now(), model_after(live.run, made)), made, clients, live.round_id))

    async def _ended(self, live: LiveRun, ended: Ended) -> None:
        """Log the end of an attempt, remember its record, and drop its sum and its updates."""
        journal.round_ended(ended.end.record)
        self.memory.note(StoredRecord(live.round_id, ended.end.record))
        if self.run.status.is_over:
            journal.run_over(self.name, self.run.status, self.run.reason)
            self._status_changed()
        self._woken.set()
        self.bells.ring_all()
        await self._closer.end(live, ended.keys)

    async def _adopt_orphans(self) -> None:
        """Fold the updates that dead replicas were to fold."""
        live, replicas = self.live, self.services.replicas
        if not isinstance(live.state, Training | Closing):
            return
        dead = {replica for replica in live.folded_by.values() if not replicas.is_alive(replica)}
        if not dead or (isinstance(live.state, Closing) and not await self._closer.leads(live)):
            return
        async with self._mailbox.moving:
            self.live = await self.services.rounds.adopt(self.live, dead)
            await self._noticed(live, self.live)
            await self._take_up()

    async def _take_up(self) -> None:
        """Fold the updates that this replica is responsible for and has not folded yet."""
        live = self.live
        if isinstance(live.state, Training | Closing):
            await torch_imported()
            from umbel.server.sums.share import SumDropped

            with suppress(SumDropped):  # another replica has ended the attempt; the next look shows it
                await self._closer.share.take_up(live, live.state.accepted)


def _turn(state: RoundState) -> tuple[str, Phase | None]:
    """The phase of the round, and of its exchange if it is secure: a change of either wakes the cohort."""
    exchange = exchange_of(state)
    return state.phase, exchange.phase if exchange else None
