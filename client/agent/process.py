"""The process of one run, as its agent sees it: start it, ask it to leave, learn how it ended."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

from umbel.aggregation.phrases import exit_words
from umbel.client.agent.notes import Doing, Note, forget_note, last_note
from umbel.client.agent.order import EARLIER_AT_WORK, LEAVE, RETIRE, WITHDRAW, ChildOrder

_COMMAND = (sys.executable, "-P", "-m", "umbel.client.agent.child")
"""`-P`: Python and umbel are not imported from the current directory. The site's own code is, once they are loaded."""
_EXIT_S = 30.0


class RunProcess:
    """A running process. Its log lines go where the agent's go.

    It gets a session of its own, so that Ctrl-C in a terminal reaches the agent only, which then asks it to leave.
    """

    def __init__(self, order: ChildOrder, work: Path) -> None:
        self.order = order
        self._work = work
        self._was_told_to_leave = False
        forget_note(work)  # of an earlier process: this one may die before its first
        self._process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, start_new_session=True)
        self._say(order.line())

    @property
    def pid(self) -> int:
        return self._process.pid

    def retire(self) -> None:
        """Ask it to leave before its next assignment."""
        self._say(RETIRE)

    def withdraw(self) -> None:
        """Make it leave at once, without sending anything more; it only declines what it works on."""
        self._say(WITHDRAW)

    def leave(self) -> None:
        """Ask it to leave now: it sends the steps that it has done, or finishes a sum that waits for it."""
        # The pipe stays open: the site may withdraw from the run while the process still sends what it has done.
        if not self._was_told_to_leave:
            self._was_told_to_leave = True
            self._say(LEAVE)

    def interrupt(self) -> None:
        """Make it leave at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def note(self) -> Note | None:
        """Its newest note; None before the first."""
        return last_note(self._work)

    def ended(self) -> Note | None:
        """How it ended; None while it is alive. A process that died without a word is a failure."""
        if (status := self._process.poll()) is None:
            self._end_if_stuck()
            return None
        self._close()
        note = self.note()
        if status == EARLIER_AT_WORK:
            return Note(Doing.LEFT, 0.0, reason="an earlier process of this run is still at work")
        if note is not None and note.has_ended:
            return note
        return Note(
            Doing.FAILED, 0.0, 0 if note is None else note.round, 0 if note is None else note.reports, _how(status)
        )

    def _end_if_stuck(self) -> None:
        """Kill a process that has noted its end and does not exit, as a thread of the site's own code may cause."""
        note = self.note()
        if note is not None and note.has_ended and time.time() - note.at > _EXIT_S:
            self.kill()

    def _close(self) -> None:
        assert self._process.stdin is not None, "it was started with a pipe"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _say(self, line: bytes) -> None:
        assert self._process.stdin is not None, "it was started with a pipe"
        if self._process.stdin.closed:
            return  # it has ended
        with contextlib.suppress(BrokenPipeError):  # it has died, as `ended` will tell
            self._process.stdin.write(line)
            self._process.stdin.flush()


def _how(status: int) -> str:
    """How a process ended that has not noted it."""
    if status == 0:  # the note could not be written, as on a full disk
        return "its process ended without an error, and could not note why; the log says more"
    return f"its process was {exit_words(status)}" if status < 0 else exit_words(status)
