"""What an agent logs of its verdicts: a sentence for each that is new, and a bounded number of lines in a minute.

The coordinator chooses how many runs it lists, and may change all of them at each answer.
"""

import logging

from umbel.aggregation.phrases import counted
from umbel.aggregation.types import RunId
from umbel.client.agent.site_commands import SiteCommands
from umbel.client.agent.verdict import Stand, Verdict

LINES_MAX = 20  # in `LINES_S`
LINES_S = 60.0
_SENTENCES = {
    Stand.ASKED: "it is waiting for a person at this site",
    Stand.ALLOWED: "this site allows it",
    Stand.DENIED: "this site denies it",
    Stand.REFUSED: "this site refuses it",
    Stand.NO_APP: "this site has no code for it",
}
log = logging.getLogger("umbel.client")


class VerdictLog:
    """The lines of one agent. `begin` and `end` enclose each look at the runs."""

    def __init__(self, commands: SiteCommands) -> None:
        self._commands = commands
        self._since = float("-inf")
        self._n_lines = self._n_left_out = 0
        self._has_summed_up = False

    def begin(self, now: float) -> None:
        """`now`: on the monotonic clock."""
        if now - self._since >= LINES_S:
            self._since, self._n_lines, self._has_summed_up = now, 0, False

    def say(self, run: RunId, verdict: Verdict) -> None:
        """Log a new verdict, or count it if too many were logged."""
        if self._n_lines >= LINES_MAX:
            self._n_left_out += 1
            return
        self._n_lines += 1
        level = logging.INFO if verdict.stand in (Stand.ALLOWED, Stand.DENIED) else logging.WARNING
        log.log(level, "run %s: %s", run, sentence(verdict))

    def end(self) -> None:
        """Say once in `LINES_S` how many verdicts were not logged."""
        if self._n_left_out and not self._has_summed_up:
            more, look = counted(self._n_left_out, "more verdict"), self._commands.text("runs")
            log.warning("this log leaves out %s on runs. To see all runs: %s", more, look)
            self._n_left_out, self._has_summed_up = 0, True


def sentence(verdict: Verdict) -> str:
    """How the site stands to a run, why, and what to do."""
    if verdict.stand is Stand.DENIED and verdict.reason:
        return verdict.reason  # it names the person who denies it
    between = ": " if verdict.stand in (Stand.REFUSED, Stand.NO_APP) else "; "
    return _SENTENCES[verdict.stand] + (between + verdict.reason if verdict.reason else "")
