"""Who hears how an experiment goes."""

from umbel.sim.experiment.file import Trial
from umbel.sim.experiment.trials import TrialResult
from umbel.sim.federation.rows import Row


class Watcher:
    """Hears how an experiment goes; this one says nothing."""

    def begins(self, trial: Trial) -> None:
        """A run begins, or is gone on with."""

    def row(self, trial: Trial, row: Row) -> None:
        """An attempt has ended."""

    def ends(self, result: TrialResult) -> None:
        """A run is over."""
