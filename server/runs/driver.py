"""One run, driven: inputs in, one transaction for those that are waiting (`step.py`), then its commands carried out.

A task of its own supplies the inputs that no request causes: waiting clients, the end of the window, the result of a
closed round (`closing.py`). After a restart it continues from the stored state. Every replica has a driver for every
run, and any of them may move it.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, assert_never

from umbel.aggregation.messages import ReportAnswer, RunStatus
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.round.cohort import too_few
from umbel.aggregation.round.machine import advance, next_deadline
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
    Spoiled,
    Tick,
    Training,
)
from umbel.aggregation.run.endings import model_after
from umbel.aggregation.secagg.turns import RANDOM_BYTES, Phase
from umbel.aggregation.types import AssignmentId, ClientId, RunId
from umbel.server import journal
from umbel.server.devices.fitness import RunMembers
from umbel.server.devices.pacing import Pacing
from umbel.server.devices.waiting import Bells, WaitingRoom
from umbel.server.runs.assignments import Assignments
from umbel.server.runs.inputs import Happening, Made, RunInput
from umbel.server.runs.mailbox import Answers, Mailbox
from umbel.server.runs.memory import RunMemory
from umbel.server.runs.orders import Order
from umbel.server.runs.step import Step, take_step
from umbel.server.runs.view import RunNow
from umbel.server.services import Services
from umbel.server.store.outage import DatabaseAway
from umbel.server.store.stored import Ended, LiveRun, StoredRecord, StoredRun, Traffic
from umbel.server.sums.secure import SecureRounds

if TYPE_CHECKING:  # these import torch, which takes seconds: a coordinator listens before that
    from umbel.aggregation.codec.update_codec import UpdateReader
    from umbel.server.sums.closing import Closer
    from umbel.server.sums.round_codec import RoundCodec

_log = logging.getLogger(__name__)
_RETRY_S_MAX = 60.0
_DATABASE_RETRY_S = 1.0
_GATHERING_SHARE = 20  # of its time, the task spends at most one part in so many, and one, on counting who waits
_GATHERING_PAUSE_S_MAX = 1.0  # what comes in meanwhile waits so long at most
_WATCH_S = 0.1  # another replica closes the round: see whether it still does
_RELAY_S = 0.25  # and in a secure one, what clients have revealed elsewhere
_FEW = 200  # so many are counted in no time


class RunDriver:
    """A run as this replica knows it. `live`: as it was stored when this replica last looked.

    `now`: what it shows of its round; `asked_at`: when a request last asked for it.
    """

    def __init__(self, services: Services, live: LiveRun, layout: Layout) -> None:
        self.services = services
        self.live = live
        self.layout = layout
        self.asked_at = float("-inf")
        self.bells = Bells()
        self.waiting = WaitingRoom(live.name, services.waiters, services.clock)
        self.members = RunMembers(services.member_lists, live.run.file, services.clock)
        self.memory = RunMemory(services, live, self.bells)
        self.now = RunNow(services, self.memory, self.waiting, self.bells, lambda: self.live)
        self.assignments = Assignments(services)
        self.secure = SecureRounds(services, self.assignments.of)
        self._mailbox = Mailbox(live.name, self._step, self._look_again)
        self._traffic = Traffic()
        self._flushing = asyncio.Lock()
        self._n_gathered = 0
        self._outage: Outage | None = None  # not told to the run yet
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # --- what it is ---------------------------------------------------------------------------------------------------

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
        """The plan of the newest attempt."""
        return self.live.plan

    async def _import_torch(self) -> None:
        """In a thread, because it takes seconds: an open round will need it."""
        if "_closer" not in self.__dict__:
            await asyncio.to_thread(import_module, "umbel.server.sums.closing")

    @cached_property
    def _round_codec(self) -> "RoundCodec":
        from umbel.server.sums.round_codec import RoundCodec  # it imports torch

        return RoundCodec(self.layout)

    @cached_property
    def _closer(self) -> "Closer":
        from umbel.server.sums.closing import Closer  # it imports torch

        return Closer(self.services, self.layout, self._round_codec, self.secure)

    @property
    def codec(self) -> "UpdateReader":
        """What updates of the newest attempt are read with."""
        return self._round_codec.of(self.live)

    def rank(self, client: ClientId) -> int:
        """This client's place in the newest attempt's cohort."""
        return self._round_codec.rank(self.live, client)

    @property
    def pacing(self) -> Pacing:
        """When clients without work should come back."""
        return self.memory.pacing

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen in this run. A stop lets a round that has closed commit."""
        return self.run.status.is_over and not isinstance(self.state, Closing)

    @property
    def is_paused(self) -> bool:
        """Whether no round is begun until an operator resumes the run. One that is open goes on."""
        return self.run.status is RunStatus.PAUSED

    def assignment_id(self, client: ClientId) -> AssignmentId:
        """This client's assignment in the newest attempt, if it has one."""
        return self.live.assignment_id(client)

    def knows(self, client: ClientId, assignment: AssignmentId) -> bool:
        """Whether this is the client's assignment in the newest attempt."""
        return self.live.knows(client, assignment)

    def open_round(self, client: ClientId) -> Training | None:
        """The round under way, if it still waits for this client."""
        return self.live.open_round(client, self.services.clock.now())

    # --- its life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take up the newest attempt as it was stored, and begin to drive."""
        await self.memory.start()
        await self._take_up()
        self._task = asyncio.create_task(self._drive(), name=f"run {self.name}")

    async def close(self) -> None:
        """Stop driving. What is stored stays as it is; a transaction that has begun is waited for.

        Cut short, it would leave SQLite locked until its connection is collected.
        """
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._mailbox.close()
        await self._closer.forget()
        await self._closer.settle()
        with suppress(DatabaseAway):  # the counts of a second, at most
            await self.flush_traffic()

    def wake(self) -> None:
        """Something has happened that no event tells: look again."""
        self._woken.set()
        self.now.changed()

    async def submit(self, given: RunInput) -> ReportAnswer | None:
        """Let an input count; returns the answer to a report. Durable on return.

        Raises `Refused` or an `UpdateRefused` for what cannot count, `PastAttempt`.
        """
        return await self._mailbox.submit(given)

    async def catch_up(self) -> None:
        """See what other replicas have done."""
        async with self._mailbox.moving:
            before, after = self.live, await self.services.rounds.refresh(self.live)
            if after is not before:
                self.live = after
                await self._noticed(before, after)

    async def obey(self, order: Order) -> None:
        """Do as an operator says. Durable on return; raises `Refused` for what cannot be done."""
        await self.submit(order)
        self.wake()
        self.bells.ring_all()

    async def was_away(self, outage: Outage) -> None:
        """Nobody could take reports for a while: the window does not count it."""
        self._outage = outage
        await self.submit(Happening())

    def note_download(self, client: ClientId, n_bytes: int) -> None:
        """Count bytes that a client of the cohort has fetched; they are stored before long."""
        if isinstance(self.state, Training) and client in self.state.cohort:
            self._traffic.down[self.assignment_id(client)] += n_bytes

    def note_message(self, assignment: AssignmentId, *, up: int = 0, down: int = 0) -> None:
        """Count bytes of a secure round's messages that no transaction counts, likewise."""
        self._traffic.up[assignment] += up
        self._traffic.down[assignment] += down

    async def flush_traffic(self) -> None:
        """Store what has been counted; on return it is, also what somebody else had begun to store.

        It goes on without whoever is cancelled meanwhile: rolled back, it would be lost. `close` waits for it.
        """
        await asyncio.shield(self._store_traffic())

    async def _store_traffic(self) -> None:
        async with self._flushing:
            traffic, self._traffic = self._traffic, Traffic()
            await self.services.rounds.add_traffic(self.name, traffic)

    # --- the page -----------------------------------------------------------------------------------------------------

    async def _drive(self) -> None:
        """What happens by itself. Trouble (a full disk, say) is logged, shown, and tried again ever more slowly."""
        retry_s = 1.0
        while not self.is_over:
            try:
                await self._act()
                self.now.trouble, retry_s = "", 1.0
            except DatabaseAway:  # told once, for all that asks
                self._show_trouble("the database does not answer")
                await self.services.clock.wait(asyncio.Event(), _DATABASE_RETRY_S)
            except Exception as error:
                _log.exception("run %s cannot continue; trying again in %.0f s", self.name, retry_s)
                self._show_trouble(f"the coordinator is in trouble ({type(error).__name__}, see its log)")
                await self.services.clock.wait(asyncio.Event(), retry_s)
                retry_s = min(2 * retry_s, _RETRY_S_MAX)

    def _show_trouble(self, words: str) -> None:
        self.now.trouble = words
        self.now.changed()

    async def _act(self) -> None:
        """Do what is due, then sleep until something may be."""
        self._woken.clear()
        if not isinstance(self.state, Recruiting):
            await self._import_torch()
        before, began = self.live, self.services.clock.now()
        await self._adopt_orphans()
        await self.memory.attendance.check(self.live, began)
        match self.state:
            case Recruiting() if not self.is_paused:
                await self._gather(self.state, began)
            case Training() | Closing() if self._is_due(began) and await self._may_end(self.live):
                live = self.live
                await self.flush_traffic()  # it may give the attempt up
                await self.submit(Happening(Tick(began, self.secure.revealed(live)), live.round_id))
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
        """Whether it is for this replica to say that the time is up: of unmasking, only for the one that is at it."""
        is_unmasking = isinstance(live.state, Closing) and live.state.is_unmasking
        return not is_unmasking or await self._closer.leads(live)

    async def _gather(self, state: Recruiting, now: float) -> None:
        """See who waits. What only changes the words for what the round waits for is not worth a transaction.

        A crowd that is known to be too small is counted, not listed.
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
        gathered = Gathered(now, candidates, random, removed)
        after, _ = advance(state, gathered)
        if not (isinstance(after, Recruiting) and after.since == state.since and self._show_waiting(state, after)):
            await self.submit(Happening(gathered))

    async def _removed(self, state: Recruiting) -> frozenset[ClientId]:
        """Who is not in the fleet any more, of the clients of sums that were opened in vain."""
        opened = state.before.opened if state.before else ()
        names = sorted({name for one in opened for name in one.clients})
        found = await asyncio.gather(*(self.services.registry.client(name) for name in names))
        return frozenset(name for name, client in zip(names, found, strict=True) if client is None)

    def _show_waiting(self, before: Recruiting, after: Recruiting) -> bool:
        """Show what the round waits for; False if the run has moved on since it was looked at."""
        if self.state is not before:
            return False
        self.live = replace(self.live, state=after)
        return True

    def _pause_s(self, looked_at: float) -> float | None:
        """How long nothing can happen by itself, as of when it was looked at last; None: until woken."""
        if isinstance(self.state, Closing) and not self._waits_for_clients:
            return _WATCH_S
        if isinstance(self.state, Closing) and not self.services.replicas.is_alone:
            return _RELAY_S
        due = next_deadline(self.state, looked_at)
        if due is None or looked_at >= due or (self.is_paused and isinstance(self.state, Recruiting)):
            return None  # patience is over: only another client changes anything
        return max(0.001, due - self.services.clock.now())

    @property
    def _waits_for_clients(self) -> bool:
        """Whether the round has closed, and its sum is not to be unmasked yet, or its shares are not in."""
        return isinstance(self.state, Closing) and self.state.secure is not None

    async def _step(self, inputs: Sequence[RunInput]) -> Answers:
        """One transaction, then its commands; an answer to each input that it took."""
        outage = self._outage or await self.services.uptime.outage()
        first = [] if outage is None else [Happening(outage)]  # no deadline or report is judged by the old window
        step = await take_step(self.services, self.memory, self.live, [*first, *inputs])
        before = self.live
        if self._outage is outage:  # and not one that has ended meanwhile
            self._outage = None
        self.live = step.shown
        await self._noticed(before, step.before)
        await self._carry_out(step)
        return step.decision.answers[len(first) :]

    def _look_again(self) -> None:
        """A step has failed, but may have been stored: whoever waits for what it commands must look."""
        self.wake()
        self.bells.ring_all()

    async def _noticed(self, before: LiveRun, after: LiveRun) -> None:
        """Other replicas have moved the run: wake whom it concerns, let go of a sum that is over."""
        if after is before:
            return
        if after.round_id != before.round_id or isinstance(after.state, Committed | Abandoned):
            await self._closer.forget()
            await self.memory.look()
            self.bells.ring_all()
        elif _turn(after.state) != _turn(before.state) and not isinstance(after.state, Recruiting):
            cohort = after.state.closing.cohort if isinstance(after.state, Committed) else after.state.cohort
            self.bells.ring(cohort)
        self.wake()
        if after.run.status is not before.run.status:
            self.bells.ring_all()

    async def _carry_out(self, step: Step) -> None:
        """Do what the machine commands. All of it can be done again after a crash, from what is stored."""
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
        """Carry out one command; its event is durable."""
        match command:
            case Invite(clients=clients) | Release(clients=clients) | Announce(clients=clients):
                self.bells.ring(clients)
            case Fold(client=client, weight=weight):
                if not isinstance(step.decision.ended, Abandoned):
                    upload = step.decision.uploads[step.before.assignment_id(client)]
                    self._closer.share.fold(step.before, client, upload.chunks, weight)
            case Answer():
                pass  # the mailbox gives it, when all the others are carried out
            case Commit() | Discard():
                self._woken.set()
            case _:
                assert_never(command)

    # --- how an attempt ends ------------------------------------------------------------------------------------------

    async def _close_round(self) -> None:
        """Make of the closed round what its kind asks for, unless another replica is at it."""
        from umbel.server.sums.closing import NothingMade  # it imports torch

        live, now = self.live, self.services.clock.now
        if not self.services.replicas.is_alone:
            await self.flush_traffic()  # another may end the round as soon as it has this one's share
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
        """An attempt has ended here: tell it, and forget its sum and its updates."""
        journal.round_ended(ended.end.record)
        self.memory.note(StoredRecord(live.round_id, ended.end.record))
        if self.run.status.is_over:
            journal.run_over(self.name, self.run.status, self.run.reason)
        self._woken.set()
        self.bells.ring_all()
        await self._closer.end(live, ended.keys)

    async def _adopt_orphans(self) -> None:
        """Fold what replicas that have died were to fold."""
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
        """Fold what this replica answers for and has not folded yet."""
        live = self.live
        if isinstance(live.state, Training | Closing):
            await self._import_torch()
            from umbel.server.sums.folding import SumDropped

            with suppress(SumDropped):  # another replica has ended the attempt: the next look shows it
                await self._closer.share.take_up(live, live.state.accepted)


def _turn(state: RoundState) -> tuple[str, Phase | None]:
    """What the round's clients wait for: its phase, and that of its exchange if it is a secure one."""
    exchange = state.exchange if isinstance(state, Training | Closing) else None
    return state.phase, exchange.phase if exchange else None
