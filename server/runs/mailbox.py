"""The mailbox of a run. All waiting inputs become one transaction, so that many reports share one write."""

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
