"""How the data of an experiment's points are partitioned with its first seed: in numbers, and as pictures.

```
OUT/split.png                     if all points share one split
OUT/split-POINT.png               otherwise, for each split, named after its first point
```

Synthetic clients have none.
"""

import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from umbel.sim.data.data_set import LearningTask
from umbel.sim.data.load import DataSection
from umbel.sim.data.partition.heterogeneity import Heterogeneity, heterogeneity
from umbel.sim.data.partition.section import PartitionSection
from umbel.sim.experiment.file import Experiment, TrialSpec
from umbel.sim.experiment.world import TrialWorld

_PICTURES = ("split.png", "split-*.png")
_TITLE_CHARACTERS = 105  # that fit above the picture

_Dealt: TypeAlias = tuple[DataSection | None, PartitionSection | None]


class Splits:
    """The different splits of an experiment's points: how different their clients are, and their pictures.

    `folder`: for missing pictures; None: no pictures.
    """

    def __init__(self, experiment: Experiment, folder: Path | None) -> None:
        self._name, self._folder = experiment.name, folder
        seeds = dict.fromkeys(trial.seed for trial in experiment.trials)
        self._seed, self._n_seeds = next(iter(seeds)), len(seeds)
        self._sharing = dict[_Dealt, list[TrialSpec]]()
        for trial in experiment.trials:
            if trial.seed == self._seed:
                self._sharing.setdefault(_dealt(trial), []).append(trial)
        self._found = dict[_Dealt, Heterogeneity]()

    def look(self, trial: TrialSpec, made: TrialWorld) -> None:
        """Compare and draw the clients of a run that begins or resumes, if it is the first of its split."""
        dealt = _dealt(trial)
        if trial is not self._sharing[dealt][0] or made.partition is None or made.data is None:
            return
        if made.data.task is LearningTask.OTHER:  # there are no classes to compare
            return
        labels = made.data.samples.targets.numpy()
        self._found[dealt] = heterogeneity(made.partition, labels)
        if self._folder is None or (path := self._folder / self._picture(trial)).exists():
            return
        from umbel.sim.results.split_plot import draw_split

        draw_split(path, made.partition, labels, title=self._title(trial))

    @property
    def by_point(self) -> Mapping[str, Heterogeneity]:
        """How different clients are, by the point's label."""
        return {trial.label: found for dealt, found in self._found.items() for trial in self._sharing[dealt]}

    def _picture(self, trial: TrialSpec) -> str:
        return "split.png" if len(self._sharing) == 1 else f"split-{trial.point_folder}.png"

    def _title(self, trial: TrialSpec) -> str:
        """The split's points, escaped for matplotlib."""
        from umbel.sim.results.plot import as_drawn

        n_more = len(self._sharing[_dealt(trial)]) - 1
        if n_more and len(self._sharing) == 1:
            whose = "every point"
        else:
            whose = trial.label + (f" (and {n_more} more of the same split)" if n_more else "")
        seed = f"seed {self._seed}" + (f", the first of {self._n_seeds} seeds" if self._n_seeds > 1 else "")
        return as_drawn(textwrap.fill(f"{self._name}: {'; '.join(filter(None, (whose, seed)))}", _TITLE_CHARACTERS))


def remove_pictures(folder: Path) -> None:
    """Remove the pictures of an experiment that has not begun, so that the next one draws its own."""
    for pattern in _PICTURES:
        for path in folder.glob(pattern):
            path.unlink()


def _dealt(trial: TrialSpec) -> _Dealt:
    """The settings that determine each client's samples. Feature skew changes only their inputs."""
    return trial.data, None if trial.partition is None else replace(trial.partition, features=None)
