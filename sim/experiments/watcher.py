"""Who hears how an experiment goes."""

from umbel.sim.experiments.file import Trial
from umbel.sim.experiments.rows import Row
from umbel.sim.experiments.trials import TrialResult


class Watcher:
    """Hears how an experiment goes; this one says nothing."""

    def begins(self, trial: Trial) -> None:
        """A run begins, or is gone on with."""

    def row(self, trial: Trial, row: Row) -> None:
        """An attempt has ended."""

    def ends(self, result: TrialResult) -> None:
        """A run is over."""
