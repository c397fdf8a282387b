"""What happens in a run, a line an event: for a log, a file or a pipe, where no picture can be redrawn."""

from collections.abc import Iterator
from datetime import datetime

from umbel.aggregation.phrases import counted, part_of
from umbel.aggregation.run.records import RoundRecord, RunProgress
from umbel.client.cli.tables import figures
from umbel.client.cli.view_rounds import Notes, absent_words, name_of
from umbel.client.printable import printable


class Events:
    """Tells of each page of news what the one before it did not tell."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}
        self._notes = Notes()

    def new_in(self, progress: RunProgress) -> Iterator[str]:
        """The lines, each with date and time, as of when they are told."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        for line in self._lines(progress):
            yield f"{now} {line}"

    def _lines(self, progress: RunProgress) -> Iterator[str]:
        for record in progress.ended:
            yield _ended(record)
            if notes := self._notes.on(record):
                yield from notes.plain.splitlines()
        for away in progress.turned_away:
            yield from self._if_new(f"away {away.client}", f"{away.client} turned away: {away.reason}")
        run, live = progress.run, progress.live
        state = f"{run.name}: {run.status.value}" + (f", {run.reason}" if run.reason else "")
        how_far = f", {part_of(run.rounds_done, run.rounds_planned, 'round', 'is', 'are')} done"
        if self._is_new("run", state):
            yield printable(state) + how_far
        if live is not None and self._is_new("live", f"{name_of(live)}: {live.phase}"):
            left = "" if live.closes_in_s is None else f", closes in {live.closes_in_s:.0f} s"
            asked = f", {counted(len(live.clients), 'client is', 'clients are')} asked" if live.clients else ""
            absent = f"; {absent_words(live.absent)}" if live.absent and live.absent.clients else ""
            yield printable(f"{name_of(live)}: {live.phase}{asked}{left}; {live.why}{absent}")

    def _if_new(self, topic: str, line: str) -> Iterator[str]:
        if self._is_new(topic, line):
            yield printable(line)

    def _is_new(self, topic: str, line: str) -> bool:
        is_new = self._told.get(topic) != line
        self._told[topic] = line
        return is_new


def _ended(record: RoundRecord) -> str:
    outcome = "done" if record.committed else "failed" if record.task.tries_clients else "abandoned"
    counts = f"{record.reported} of {counted(record.selected, 'client')} reported"
    if record.samples_selected:  # a secure round is not told who has how much
        counts += f", {record.samples_share:.0%} of their data"
    means = [
        f"{where}: {figures(found)}"
        for where, found in (("training", record.metrics), ("held-out", record.evaluation))
        if found
    ]
    cost = [] if record.epsilon is None else [f"epsilon {record.epsilon:.3g} so far"]
    return f"{name_of(record)}: {outcome} in {record.wall_s:.1f} s, {'; '.join([counts, *means, *cost])}"
