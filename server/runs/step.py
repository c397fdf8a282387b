"""One step of a run, in one transaction: load it under its lock, decide, save.

All inputs that wait in the run's mailbox go into one step, so that many reports share one write. No other replica
decides on the same state, and an answer is sent only after it is stored.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from pydantic import TypeAdapter

from umbel.aggregation.audit.bundle import KeptUpdates, Sealed
from umbel.aggregation.messages import ReportAnswer
from umbel.aggregation.round.states import Abandoned, Committed
from umbel.aggregation.run.records import RoundRecord
from umbel.aggregation.run.run_end import KeptVersion, RoundEnd
from umbel.aggregation.types import RunId
from umbel.server.problems import shutting_down
from umbel.server.runs.bundle_facts import AttemptClients, attempt_clients, retention_of, round_ended
from umbel.server.runs.decision import Decision, ReportInput, RunInput, decide, needs_history
from umbel.server.runs.memory import RunMemory
from umbel.server.services import Services
from umbel.server.store.locked_run import EndedAttempt, LockedRun
from umbel.server.store.stored import Ended, LiveRun

Answers: TypeAlias = Sequence[ReportAnswer | Exception | None]
StepFunction: TypeAlias = Callable[[Sequence[RunInput]], Awaitable[Answers]]
"""Takes the first of these inputs, at least one; returns an answer to each that it took, once they are durable."""
_RECORD = TypeAdapter(RoundRecord)


@dataclass(slots=True, eq=False)
class _Pending:
    given: RunInput
    done: "asyncio.Future[ReportAnswer | None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def answer(self, answer: ReportAnswer | BaseException | None) -> None:
        if self.done.done():
            return  # its request was cancelled
        if isinstance(answer, BaseException):
            self.done.set_exception(answer if isinstance(answer, Exception) else shutting_down())
            self.done.exception()  # marks it as seen, because the request may be gone
        else:
            self.done.set_result(answer)


class Mailbox:
    """Inputs in the order of their arrival. `moving`: held during a step, here or while another's is loaded."""

    def __init__(self, run: RunId, step: StepFunction, on_failure: Callable[[], None]) -> None:
        self.moving = asyncio.Lock()
        self._run = run
        self._step = step
        self._on_failure = on_failure
        self._pending: list[_Pending] = []
        self._task: asyncio.Task[None] | None = None

    async def submit(self, given: RunInput) -> ReportAnswer | None:
        """Take an input in the next step; return the answer to a report. The step is durable on return.

        Raises the exception that is the step's answer to this input, or the one that made the step fail.
        """
        pending = _Pending(given)
        self._pending.append(pending)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._empty(), name=f"mail of {self._run}")
        return await pending.done

    async def close(self) -> None:
        """Refuse the waiting inputs, and wait for a step that has begun."""
        pending, self._pending = self._pending, []
        for one in pending:
            one.answer(asyncio.CancelledError())
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _empty(self) -> None:
        """Take steps until no input is left. This is its own task, because requests may be cancelled."""
        async with self.moving:
            while self._pending:
                batch, self._pending = self._pending, []
                try:
                    answers = await self._step([one.given for one in batch])
                except BaseException as error:
                    for one in batch:
                        one.answer(error)
                    if not isinstance(error, Exception):
                        raise
                    self._on_failure()
                    continue
                for one, answer in zip(batch, answers, strict=False):
                    one.answer(answer)
                self._pending = [*batch[len(answers) :], *self._pending]


@dataclass(frozen=True, slots=True)
class Step:
    """The decision of a step, and the run after it. `ended`: how the attempt ended, if it did."""

    decision: Decision
    after: LiveRun
    ended: Ended | None

    @property
    def before(self) -> LiveRun:
        """The run as it was stored when the step began, with the changes of other replicas."""
        return self.decision.before

    @property
    def shown(self) -> LiveRun:
        """The run as this replica shows it; while recruiting, with what the round waits for."""
        waiting = self.decision.waiting
        return self.after if waiting is None else replace(self.after, state=waiting)


async def take_step(services: Services, memory: RunMemory, known: LiveRun, inputs: Sequence[RunInput]) -> Step:
    """Take one step with the first of these inputs, at least one if there are any. It is durable on return."""
    async with services.rounds.locked(known) as run:
        uploads = await run.uploads([one.assignment for one in inputs if isinstance(one, ReportInput)])
        history = await run.history() if needs_history(inputs) else ()
        decision, ended = decide(inputs, run.live, uploads, history), None
        if not decision.changes_nothing:
            await run.save(decision.change)
        if decision.ended is not None:
            ended = await _end(services, memory, run, decision, decision.ended, history)
    return Step(decision, run.live, ended)


async def _end(
    services: Services,
    memory: RunMemory,
    run: LockedRun,
    decision: Decision,
    state: Abandoned | Committed,
    history: Sequence[KeptVersion],
) -> Ended:
    """End the attempt. Long computations run on a thread, so that the event loop is not blocked."""
    thread, live = services.decider, run.live
    stored = await run.clients() if decision.made is None else None

    def end() -> tuple[RoundEnd, AttemptClients, str]:
        if stored is None:
            assert decision.made is not None, "only a result commits a round"
            clients = decision.made.clients  # described before the transaction
        else:
            assert isinstance(state, Abandoned), "only a result commits a round"
            assignments, evidence = stored
            clients = attempt_clients(state, memory.book(decision.before, assignments), evidence)
        found = decision.end(live.run, state, memory.known(live.run, clients, history))
        record = replace(found.record, absent=memory.attendance.absent_from(live.round_id))
        return replace(found, record=record), clients, _RECORD.dump_json(record).decode()

    ending, clients, record = await thread.run(end)
    retention = retention_of(live, ending)
    expired = () if retention.expired_round is None else await run.with_updates_until(retention.expired_round)
    updates = KeptUpdates(retention.keeps, tuple(one.number for one in expired), retention.reason)
    file_sha256 = run.live.run.file_sha256

    def seal() -> Sealed:
        facts = round_ended(live, ending, file_sha256, clients, updates)
        return services.audit_key.seal(live.name, live.run.audit_number + 1, live.run.audit_sha256, facts)

    bundle = await thread.run(seal)
    return await run.end(EndedAttempt(ending, record, bundle, retention.keeps, expired))
