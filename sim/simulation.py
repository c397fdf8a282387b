"""Simulate every run of an experiment, with interruptions and resumption, and write the results.

```
OUT/experiment.json               the experiment of this folder
OUT/runs/RUN/                     each run's rows and checkpoint (checkpoint.py), and its last model
OUT/split.png                     the partition; if points differ in it, split-POINT.png for each (splits.py)
OUT/rounds.jsonl, ...             the results, when all runs are done (results.py)
```
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from umbel.client.files import write_atomically
from umbel.sim.experiment.checkpoint import ROWS_FILE
from umbel.sim.experiment.extension import require_extension
from umbel.sim.experiment.file import Experiment, TrialSpec, experiment_of, read_experiment
from umbel.sim.experiment.rehearsal import rehearse
from umbel.sim.experiment.trials import TrialResult, Watcher, run_trial
from umbel.sim.federation.rows import Row
from umbel.sim.federation.standing import SimulationError
from umbel.sim.recorded.against_trace import against, calibrate
from umbel.sim.results.findings import by_point
from umbel.sim.results.results import Results
from umbel.sim.results.splits import Splits, remove_pictures

EXPERIMENT_FILE, RUNS_FOLDER = "experiment.json", "runs"
_NO_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")  # torch's, of processors and of GPUs


Described: TypeAlias = Experiment | Mapping[str, Any] | Path | str


def simulate(
    experiment: Described,
    out: Path | str | None = None,
    data: Path | str | None = None,
    *,
    changes: Mapping[str, object] | None = None,
    watcher: Watcher | None = None,
    progress: bool = False,
) -> Results:
    """Simulate every run of an experiment, and return what they showed.

    `experiment`: the path of a file, a table like such a file, or an experiment that was read. `out`: the folder for
    the results; the same experiment there is resumed, and extended if this one has more rounds, seeds or points. None:
    nothing is written. `data`: the folder of data sets that are read from files. `changes`: values that replace the
    file's, by dotted key. `progress`: show progress bars on standard error, or in the notebook; a `watcher` replaces
    them.

    Raises `ValueError` with a sentence for an invalid experiment, or a folder that holds another one; `OSError`,
    `EngineError`, `SimulationError`, `CheckpointError`.
    """
    one = _read(experiment, changes)
    folder, data = None if out is None else Path(out), None if data is None else Path(data)
    with contextlib.nullcontext() if folder is None else _claimed(folder, one):
        with _memory_in_words():
            careful = rehearse(one.trials, one.folder, data)
        with _watched(one, watcher, progress) as heard, _memory_in_words():
            return _simulated(one, folder, data, heard, careful)


@contextlib.contextmanager
def _memory_in_words() -> Generator[None]:
    """Turn a lack of memory into a `SimulationError`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in _NO_MEMORY):
            raise
        raise SimulationError(
            "there is too little memory for this model, its data and its cohort: take a smaller model, train_limit in "
            '[data], a lower rounds.target, or name = "sequential" in [engine], which holds one client at a time'
        ) from error


def _watched(one: Experiment, watcher: Watcher | None, progress: bool) -> contextlib.AbstractContextManager[Watcher]:
    if watcher is not None or not progress:
        return contextlib.nullcontext(watcher or Watcher())
    from umbel.sim.results.shown import Bars

    return Bars.here(len(one.trials))


def _simulated(
    one: Experiment, folder: Path | None, data: Path | None, watcher: Watcher, careful: tuple[str, ...]
) -> Results:
    calibrations = calibrate(one.trials, one.folder)
    splits, results = Splits(one, folder), list[TrialResult]()
    for trial in one.trials:
        watcher.begins(trial)
        place = None if folder is None else folder / RUNS_FOLDER / trial.folder
        results.append(run_trial(trial, place, one.folder, data, _teller(watcher, trial), partial(splits.look, trial)))
        watcher.ends(results[-1])
    beside = tuple(against(calibration, by_point(results)) for calibration in calibrations)
    notes = (*one.notes, *(f"Careful: {words}." for words in careful))
    found = Results(one.name, tuple(results), one.target_accuracy, folder, beside, splits.by_point, notes)
    if folder is not None:
        found.write(folder)
    return found


def _read(experiment: Described, changes: Mapping[str, object] | None) -> Experiment:
    match experiment:
        case Experiment():
            if changes:
                raise ValueError("changes apply to a file or a table, not to an experiment that was read")
            return experiment
        case str() | Path():
            return read_experiment(Path(experiment), changes)
        case _:
            return experiment_of(experiment, changes)


@contextlib.contextmanager
def _claimed(folder: Path, experiment: Experiment) -> Generator[None]:
    """Lock the folder for this process and this experiment. Raises `ValueError` if that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ValueError(f"{folder} is no folder; choose another (--out)") from error
    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"another process simulates in {folder}; wait for it, or choose another folder (--out)"
            ) from error
        _claim(folder, experiment)
        yield
    finally:
        os.close(fd)  # closing drops the lock, and so does dying


def _claim(folder: Path, experiment: Experiment) -> None:
    """Make the folder this experiment's. Raises `ValueError` if a run was begun in it that this one does not extend."""
    path = folder / EXPERIMENT_FILE
    if path.exists():
        if path.read_bytes() == experiment.text.encode():
            return
        if any(folder.glob(f"{RUNS_FOLDER}/*/{ROWS_FILE}")):
            require_extension(folder, path.read_text(errors="replace"), experiment)
        remove_pictures(folder)  # of the older version of the file
    elif any(folder.iterdir()):
        raise ValueError(f"{folder} holds other files; choose a folder that is empty, or does not exist")
    write_atomically(path, experiment.text.encode())


def _teller(watcher: Watcher, trial: TrialSpec) -> Callable[[Row], None]:
    return lambda row: watcher.row(trial, row)
