"""How far an experiment is, on standard error or in a notebook."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from umbel.aggregation.plans.round import Task
from umbel.sim.experiment.file import Trial
from umbel.sim.experiment.trials import TrialResult
from umbel.sim.experiment.watcher import Watcher
from umbel.sim.federation.rows import Row


class Bars(Watcher):
    """A bar for the rounds of the run at hand, and one for the runs, if there are several."""

    def __init__(self, n_trials: int) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[told]}", markup=False),
        )
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._n_trials = n_trials
        self._all: TaskID | None = None
        self._one: TaskID | None = None

    def __enter__(self) -> "Bars":
        self._progress.start()
        if self._n_trials > 1:
            self._all = self._progress.add_task("runs", total=self._n_trials, told="")
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begins(self, trial: Trial) -> None:
        if self._one is not None:
            self._progress.remove_task(self._one)
        self._one = self._progress.add_task(trial.name, total=trial.run.rounds.count, told="")

    def row(self, trial: Trial, row: Row) -> None:
        if self._one is None or not Task(row.task).makes_model:
            return
        if not row.committed:
            self._progress.update(self._one, told=f"round {row.round}, attempt {row.attempt}: {row.reason}")
            return
        self._progress.update(self._one, completed=row.round)
        if row.accuracy is not None:
            self._progress.update(self._one, told=f"accuracy {row.accuracy:.1%}")

    def ends(self, result: TrialResult) -> None:
        if self._all is not None:
            self._progress.advance(self._all)
