"""One run of an agent: the verdict on it, its process, and how often that has failed."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from umbel.aggregation.messages import OpenRun
from umbel.aggregation.types import RunId
from umbel.client.agent.absences import Absence
from umbel.client.agent.board import SiteRun
from umbel.client.agent.decisions import SiteDecision
from umbel.client.agent.notes import Doing, Note
from umbel.client.agent.order import ChildOrder
from umbel.client.agent.process import RunProcess
from umbel.client.agent.retries import RETRY, Failing
from umbel.client.agent.site_commands import SiteCommands
from umbel.client.agent.verdict import Stand, Verdict
from umbel.client.agent.verdict_log import VerdictLog
from umbel.client.files import locked_file
from umbel.client.state.state_dir import LOCK_FILE

_AGAIN_S = 1.0  # until a process that left is started again
_RETIRES_S = 15.0  # in which a process that waits for work sees that it should leave, unless it was sent away for long
_LEAVES_S = 10.0  # in which a process leaves whose run the site no longer allows, or is killed
_LEARNS_S = 5.0  # in which the process of a run that is over learns by itself how the run ended, or is told to leave
STARTING = "its process at the site is starting"
NOT_RUNNING = "its process at the site is not running, and is started again; the site's log says more"
"""Neither the error nor how often it came: crafted weights could make them tell of the site's data."""
NO_LONGER_OPEN = "the coordinator no longer lists it"
Start = Callable[[ChildOrder, Path], RunProcess]
log = logging.getLogger("umbel.client")


class SupervisedRun:
    """`work`: the run's directory. `verdict_log`: of the agent. `is_over`: the run has ended, or is no longer listed,
    and no process is left.
    """

    def __init__(
        self,
        run: OpenRun,
        work: Path,
        commands: SiteCommands,
        verdict_log: VerdictLog,
        start: Start = RunProcess,
    ) -> None:
        self.run = run
        self._work = work
        self._commands = commands
        self._verdict_log = verdict_log
        self._start = start
        self._process: RunProcess | None = None
        self._started_at = 0.0
        self._retired_at: float | None = None  # when the process was asked to leave after its round
        self._withdrawn_at: float | None = None  # when the process was told to leave at once
        self._is_killed = False
        self._verdict = Verdict(Stand.ASKED)
        self._has_verdict = False
        self._decision: SiteDecision | None = None
        self._app = ""
        self._failing = Failing()
        self._not_before = float("-inf")
        self._end = ""  # how the run ended
        self._is_listed = True
        self._unlisted_at = float("-inf")
        self._reports = 0  # of processes that have ended
        self._round = 0

    @property
    def name(self) -> RunId:
        return self.run.name

    @property
    def is_alive(self) -> bool:
        return self._process is not None

    @property
    def is_over(self) -> bool:
        return self._process is None and (bool(self._end) or not self._is_listed)

    def judge(self, run: OpenRun, verdict: Verdict, decision: SiteDecision | None, app: str | None) -> None:
        """Take over what the agent found at its last look."""
        if run.identity != self.run.identity:
            self._end, self._failing = "", Failing()
        self.run, self._app, self._is_listed = run, app or "", True
        if decision != self._decision:
            self._decision, self._failing = decision, Failing()  # `umbel site allow` tries a failing run at once
        self.take_verdict(verdict)

    def take_verdict(self, verdict: Verdict) -> None:
        """Take over the verdict alone: on a run that is no longer listed, or while the agent leaves. The run's process
        may still send what it has done.
        """
        if not self._has_verdict or verdict != self._verdict:
            self._verdict_log.say(self.name, verdict)
        self._verdict, self._has_verdict = verdict, True

    def unlist(self, now: float) -> None:
        """The coordinator no longer lists the run. `now`: on the monotonic clock."""
        if self._is_listed:
            self._is_listed, self._unlisted_at = False, now

    def follow(self, order: ChildOrder | None, now: float) -> None:
        """Start, keep or end the process. `order`: None if the site takes no part; `now`: on the monotonic clock."""
        if self._process is not None and (ended := self._process.ended()) is not None:
            self._took_end(ended, now)
        wanted = order if self._is_listed and not self._end else None
        if self._process is None:
            if wanted is not None and now >= max(self._failing.retry_at, self._not_before):
                self._begin(wanted, now)
        elif wanted is None:
            if self._verdict.stand is not Stand.ALLOWED:
                self._withdraw(self._process, now)
            elif self._is_listed or now - self._unlisted_at >= _LEARNS_S:
                self._process.leave()
        elif wanted != self._process.order:
            self._replace(self._process, now)

    def leave(self) -> None:
        if self._process is not None:
            self._process.leave()

    def interrupt(self) -> None:
        if self._process is not None:
            self._process.interrupt()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def absence(self) -> Absence | None:
        """Why the site does not come to this open run, as the coordinator may know it; None if it comes."""
        if self._end or not self._is_listed:
            return None
        if self._verdict.public_reason:
            return Absence(self._verdict.public_reason, self._verdict.may_change)
        if self._process is not None and (note := self._process.note()) and note.doing is not Doing.STARTING:
            return None
        return Absence(NOT_RUNNING if self._failing.count else STARTING, may_come=True)

    def shown(self) -> SiteRun:
        """The run for the board."""
        note = None if self._process is None else self._process.note()
        state, reason = self._words(note)
        round_ = note.round if note is not None and note.round else self._round
        reports = self._reports + (0 if note is None else note.reports)
        return SiteRun(self.run, state, self._verdict.stand.value, reason, self._app, round_, reports)

    def _words(self, note: Note | None) -> tuple[str, str]:
        if self._process is not None and self._verdict.stand is not Stand.ALLOWED:
            return "leaving", self._verdict.reason
        if note is not None and note.doing is Doing.OVER:
            return _end_words(note.reason)
        if note is not None and note.doing is Doing.FAILED:
            return note.doing.value, self._again(note.reason)
        if self._process is not None and (note is None or note.doing is Doing.STARTING):
            before = f"the last time it failed: {self._failing.last}" if self._failing.count else ""
            return Doing.STARTING.value, before
        if note is not None:
            return note.doing.value, note.reason
        if self._end:
            return _end_words(self._end)
        if not self._is_listed:
            return "over", NO_LONGER_OPEN
        if self._verdict.stand is Stand.ALLOWED and self._failing.count:
            return Doing.FAILED.value, self._again(self._failing.last)
        return self._verdict.stand.value, self._verdict.reason

    def _withdraw(self, process: RunProcess, now: float) -> None:
        """Let nothing more leave the site. Code that keeps a process from leaving does not delay that for long."""
        if self._withdrawn_at is None:
            self._withdrawn_at = now
            process.withdraw()
        elif now - self._withdrawn_at >= _LEAVES_S:
            if not self._is_killed:
                log.warning("run %s: the agent kills its process, which has not ended in %g s", self.name, _LEAVES_S)
            self._is_killed = True
            process.kill()

    def _replace(self, process: RunProcess, now: float) -> None:
        """Ask a process with an old order to leave after its round; one that only waits for work, now."""
        if self._retired_at is None:
            self._retired_at = now
            process.retire()
        note, is_late = process.note(), now - self._retired_at >= _RETIRES_S
        if is_late and note is not None and note.doing in (Doing.WAITING, Doing.HELD_UP):
            process.leave()

    def _begin(self, order: ChildOrder, now: float) -> None:
        self._started_at, self._retired_at, self._withdrawn_at, self._is_killed = now, None, None, False
        try:
            self._process = self._start(order, self._work)
        except OSError as error:  # too many processes, or too little memory: the other runs go on
            why = f"its process cannot be started ({error.strerror or error})"
            self._took_end(Note(Doing.FAILED, 0.0, reason=why), now)
            return
        if not self._failing.count:
            log.info("run %s: takes part, with %s, in process %d", self.name, order.app, self._process.pid)

    def _took_end(self, note: Note, now: float) -> None:
        self._process = None
        self._reports += note.reports
        self._round = note.round or self._round
        if note.doing is Doing.OVER:
            self._end, self._failing = note.reason, Failing()
            log.info("run %s is over: %s", self.name, note.reason)
            clear(self._work)
        elif note.doing is Doing.LEFT:
            self._not_before, self._failing = now + _AGAIN_S, Failing()
        else:
            before, self._failing = (
                self._failing,
                self._failing.after(note.reason, now, now - self._started_at, note.reports),
            )
            if before.last != note.reason:
                log.error("run %s failed: %s", self.name, self._again(note.reason))

    def _again(self, reason: str) -> str:
        return (
            f"{reason}. The agent tries again after pauses that grow to {RETRY.longest_s / 60:.0f} minutes; "
            f"to try at once: {self._commands.text('allow', self.name)}"
        )


def _end_words(end: str) -> tuple[str, str]:
    """The run's last status, and why."""
    status, _, reason = end.partition(": ")
    return status, reason


def clear(work: Path) -> None:
    """Remove the directory of a run that is over, unless a process is still at work in it."""
    try:
        with locked_file(work / LOCK_FILE, waits=False):
            shutil.rmtree(work)
    except BlockingIOError:
        return
    except OSError as error:
        log.warning("%s cannot be removed (%s); remove it by hand", work, error.strerror or error)
