"""The mailbox of a run. All inputs that are waiting become one transaction, so that many reports share one write."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from umbel.aggregation.messages import ReportAnswer
from umbel.aggregation.types import RunId
from umbel.server.problems import shutting_down
from umbel.server.runs.inputs import RunInput

Answers: TypeAlias = Sequence[ReportAnswer | Exception | None]
StepFunction: TypeAlias = Callable[[Sequence[RunInput]], Awaitable[Answers]]
"""Takes the first of these inputs, at least one; returns an answer to each that it took, once they are durable."""


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
            self.done.exception()  # the request may be gone, and nobody look at it
        else:
            self.done.set_result(answer)


class Mailbox:
    """Inputs in the order of their arrival. `moving`: held while the run is moved, here or by others."""

    def __init__(self, run: RunId, step: StepFunction, on_failure: Callable[[], None]) -> None:
        self.moving = asyncio.Lock()
        self._run = run
        self._step = step
        self._on_failure = on_failure
        self._pending: list[_Pending] = []
        self._task: asyncio.Task[None] | None = None

    async def submit(self, given: RunInput) -> ReportAnswer | None:
        """Let an input count; returns the answer to a report. Durable on return.

        Raises what the step gave as an answer, or what made it fail.
        """
        pending = _Pending(given)
        self._pending.append(pending)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._empty(), name=f"mail of {self._run}")
        return await pending.done

    async def close(self) -> None:
        """Refuse what is waiting. A step that has begun is waited for."""
        pending, self._pending = self._pending, []
        for one in pending:
            one.answer(asyncio.CancelledError())
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _empty(self) -> None:
        """Take steps until nothing is left. It is a task of its own, because requests may be cancelled."""
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
