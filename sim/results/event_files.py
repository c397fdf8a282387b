"""Event files for TensorBoard while an experiment runs: OUT/tensorboard/RUN of each run."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from umbel.client.tensorboard import FOLDER, EventFiles
from umbel.sim.experiment.file import TrialSpec
from umbel.sim.experiment.trials import TrialResult, Watcher
from umbel.sim.federation.rows import Row


class EventWatcher(Watcher):
    """Writes each row's points, and passes on what it is told to another watcher."""

    def __init__(self, out: Path, other: Watcher) -> None:
        """`out`: the folder of the results."""
        self._folder, self._other = out / FOLDER, other
        self._files: EventFiles | None = None  # of the run under way, from its first rows on

    def begins(self, trial: TrialSpec) -> None:
        self._other.begins(trial)

    def expects(self, trial: TrialSpec, n_rounds: int) -> None:
        self._other.expects(trial, n_rounds)

    def resumes(self, trial: TrialSpec, rows: Sequence[Row]) -> None:
        self._begun(trial, rows)
        self._other.resumes(trial, rows)

    def row(self, trial: TrialSpec, row: Row) -> None:
        self._begun(trial, ()).add(asdict(row))
        self._other.row(trial, row)

    def ends(self, result: TrialResult) -> None:
        self._begun(result.trial, result.rows)  # the run of a Flower app may have ended at an earlier start
        self.close()
        self._other.ends(result)

    def close(self) -> None:
        """Close the files of the run under way, if there is one."""
        if self._files is not None:
            self._files.close()
            self._files = None

    def _begun(self, trial: TrialSpec, rows: Sequence[Row]) -> EventFiles:
        """The run's event files. If they are new, they begin with these rows."""
        if self._files is None:
            lines: list[Mapping[str, Any]] = [asdict(row) for row in rows]
            file = trial.run if trial.flower is None else None  # an app has learning rates of its own
            self._files = EventFiles(self._folder / trial.folder, file, lines)
        return self._files


@contextmanager
def writing_events(out: Path, other: Watcher) -> Generator[EventWatcher]:
    """A watcher that writes event files in this block. Raises `TensorBoardMissing`, `OSError`."""
    watcher = EventWatcher(out, other)
    try:
        yield watcher
    finally:
        watcher.close()
