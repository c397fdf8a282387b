"""Waiting in tests: for one thing, by its name, and no longer than until it has happened.

`LIMIT_S` is reached by a hang alone, however slow or crowded the machine is; what was awaited and what was seen instead
is in the message then.
"""

import asyncio
import subprocess
import time
from collections.abc import Awaitable, Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeAlias, TypeVar

T = TypeVar("T")
LIMIT_S = 300.0
_PAUSE_S = 0.01
Process: TypeAlias = subprocess.Popen[bytes] | subprocess.Popen[str] | BaseProcess


class _Wait:
    """One wait. `seen`: says what there is instead, for the message; by default the last answer."""

    def __init__(self, what: str, seen: Callable[[], object] | None) -> None:
        self._what = what
        self._seen = seen
        self._ends_at = time.monotonic() + LIMIT_S

    def is_over(self, found: object) -> bool:
        """Whether this answer is what was awaited. Raises `AssertionError` at the limit."""
        if found:
            return True
        if time.monotonic() < self._ends_at:
            return False
        instead = repr(found) if self._seen is None else str(self._seen())
        raise AssertionError(f"waited {LIMIT_S:g} s for {self._what}; there is: {instead}")


async def until(what: str, ask: Callable[[], T | None], seen: Callable[[], object] | None = None) -> T:
    """The first true answer, while the event loop goes on."""
    wait = _Wait(what, seen)
    while not wait.is_over(found := ask()):  # noqa: ASYNC110 - nothing rings for what a test asks about
        await asyncio.sleep(_PAUSE_S)
    return found  # type: ignore[return-value]  # it is true


async def until_told(what: str, ask: Callable[[], Awaitable[T | None]], seen: Callable[[], object] | None = None) -> T:
    """`until` of a question that is itself awaited."""
    wait = _Wait(what, seen)
    while not wait.is_over(found := await ask()):  # noqa: ASYNC110 - nothing rings for what a test asks about
        await asyncio.sleep(_PAUSE_S)
    return found  # type: ignore[return-value]  # it is true


def wait_until(what: str, ask: Callable[[], T | None], seen: Callable[[], object] | None = None) -> T:
    """`until` where there is no event loop: of other threads and processes."""
    wait = _Wait(what, seen)
    while not wait.is_over(found := ask()):
        time.sleep(_PAUSE_S)
    return found  # type: ignore[return-value]  # it is true


def wait_for_file(path: Path, process: Process | None = None, log: Path | None = None) -> Path:
    """The file, once it is there; fails at once when the `process` that is to write it has ended. `log`: its words."""

    def words() -> str:
        return log.read_text()[-3000:] if log is not None and log.exists() else "nothing"

    def is_there() -> bool:
        ended = process is not None and not _is_alive(process)
        assert path.exists() or not ended, f"its process has ended before there was {path.name}: {words()}"
        return path.exists()

    wait_until(f"the file {path.name}", is_there, words)
    return path


def _is_alive(process: Process) -> bool:
    return process.is_alive() if isinstance(process, BaseProcess) else process.poll() is None
