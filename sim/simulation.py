"""Simulate every run of an experiment, with interruptions and resumption, and write the results.

```
OUT/experiment.json               the experiment of this folder
OUT/runs/RUN/                     each run's rows and checkpoint (checkpoint.py), and its last model
OUT/split.png                     the partition; if points differ in it, split-POINT.png for each (splits.py)
OUT/tensorboard/RUN/              each run's event files, if they are asked for (event_files.py)
OUT/rounds.jsonl, ...             the results, when all runs are done (results.py)
```
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Generator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from umbel.client.files import write_atomically
from umbel.client.tensorboard import FOLDER, require_event_folder, require_tensorboard
from umbel.sim.data.sets.given_data import GivenData
from umbel.sim.experiment.checkpoint import ROWS_FILE
from umbel.sim.experiment.extension import require_extension
from umbel.sim.experiment.file import Experiment, TrialSpec, experiment_of, read_experiment
from umbel.sim.experiment.objects import GivenClients, GivenLoss, GivenModel, Objects, named_keys, objects_of
from umbel.sim.experiment.rehearsal import rehearse
from umbel.sim.experiment.trials import TrialResult, Watcher, run_trial
from umbel.sim.federation.possible import SimulationError
from umbel.sim.federation.rows import Row
from umbel.sim.given import given
from umbel.sim.recorded.against_trace import against, calibrate
from umbel.sim.results.event_files import writing_events
from umbel.sim.results.findings import by_point
from umbel.sim.results.results import Results
from umbel.sim.results.splits import Splits, remove_pictures

EXPERIMENT_FILE, RUNS_FOLDER = "experiment.json", "runs"
_NO_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")  # torch's, of processors and of GPUs


Described: TypeAlias = Experiment | Mapping[str, Any] | Path | str


def simulate(
    experiment: Described | None = None,
    out: Path | str | None = None,
    data: Path | str | GivenData | None = None,
    *,
    model: GivenModel | None = None,
    loss: GivenLoss | None = None,
    clients: GivenClients | None = None,
    changes: Mapping[str, object] | None = None,
    watcher: Watcher | None = None,
    progress: bool = False,
    tensorboard: bool = False,
) -> Results:
    """Simulate every run of an experiment, and return what they showed.

    `experiment`: the path of a file, a table like such a file, or an experiment that was read. `out`: the folder for
    the results; the same experiment there is resumed, and extended if this one has more rounds, seeds or points. None:
    nothing is written. `data`: the folder of data sets that are read from files. `changes`: values that replace the
    file's, by dotted key.

    Objects may stand for parts of the experiment: `model`: an `nn.Module`, or a function that makes one; `loss`: a
    function of (output, target), or a name; `data`: arrays or data sets; `clients`: a list of `Client` objects, or a
    function `make_client(number, of[, data])`. They are used by the engines of this process (`objects.py` says what of
    them identifies a folder's experiment).

    `progress`: show progress bars on standard error, or in the notebook; a `watcher` replaces them. `tensorboard`:
    write event files while the runs go on, to `out`/tensorboard.

    Raises `ValueError` with a sentence for an invalid experiment, objects that cannot be used, or a folder that holds
    another experiment; `OSError`, `EngineError`, `SimulationError`, `CheckpointError`, `TensorBoardMissing`.
    """
    folder = None if out is None else Path(out)
    data_folder = Path(data) if isinstance(data, str | Path) else None
    objects = objects_of(model, loss, None if isinstance(data, str | Path) else data, clients)
    with given(objects.found):
        one, shown = _described(experiment, objects, changes), {"progress": progress, "tensorboard": tensorboard}
        return _run(one, folder, data_folder, watcher, **shown)


def _described(experiment: Described | None, objects: Objects, changes: Mapping[str, object] | None) -> Experiment:
    """The experiment with the keys that objects set. Raises `ValueError`."""
    if not objects.keys:
        if experiment is None:
            raise ValueError("there is nothing to simulate: give the path of an experiment, a table, or objects")
        return _read(experiment, changes)
    if isinstance(experiment, Experiment):
        raise ValueError("objects go with a file or a table, not with an experiment that was read")
    table: Mapping[str, Any] = experiment if isinstance(experiment, Mapping) else {}
    if experiment is None or isinstance(experiment, Mapping):
        return _read(table, {**named_keys(table, objects.keys), **(changes or {})})
    return _read(experiment, {**objects.keys, **(changes or {})})


def _run(
    one: Experiment,
    folder: Path | None,
    data: Path | None,
    watcher: Watcher | None,
    *,
    progress: bool,
    tensorboard: bool,
) -> Results:
    if tensorboard:
        require_tensorboard()
        if folder is None:
            raise ValueError("event files for TensorBoard need a folder: give out")
    if folder is not None and find_spec("matplotlib") is None:  # it draws the results when all runs are done
        raise ModuleNotFoundError("matplotlib is not installed", name="matplotlib")
    with contextlib.nullcontext() if folder is None else _claimed(folder, one):
        if tensorboard and folder is not None:
            require_event_folder(folder / FOLDER)
        with _memory_in_words():
            careful = _rehearsed(one, data)
        with (
            _watched(one, watcher, progress) as heard,
            _with_events(folder if tensorboard else None, heard) as told,
            _memory_in_words(),
        ):
            return _simulated(one, folder, data, told, careful)


def _rehearsed(one: Experiment, data: Path | None) -> tuple[str, ...]:
    """Find errors before the first round. Returns warnings, each once."""
    if any(trial.flower is not None for trial in one.trials):
        from umbel.sim.flower.project import require_apps  # which needs Flower

        require_apps(one.trials, one.folder)
    return rehearse([trial for trial in one.trials if trial.flower is None], one.folder, data)


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


def _with_events(out: Path | None, watcher: Watcher) -> contextlib.AbstractContextManager[Watcher]:
    """A watcher that also writes event files to this folder; the same one for None."""
    return contextlib.nullcontext(watcher) if out is None else writing_events(out.absolute(), watcher)


def _simulated(
    one: Experiment, folder: Path | None, data: Path | None, watcher: Watcher, careful: tuple[str, ...]
) -> Results:
    calibrations = calibrate(one.trials, one.folder)
    # The experiment's own code may change the current directory.
    out, base = None if folder is None else folder.absolute(), one.folder.absolute()
    files = None if data is None else data.absolute()
    splits, results = Splits(one, out), list[TrialResult]()
    for trial in one.trials:
        watcher.begins(trial)
        place = None if out is None else out / RUNS_FOLDER / trial.folder
        where, tell = (place, base, files), _teller(watcher, trial)
        if trial.flower is None:
            heard = tell, partial(splits.look, trial), partial(watcher.resumes, trial)
            results.append(run_trial(trial, *where, *heard))
        else:
            from umbel.sim.flower.trial import run_app  # which needs Flower

            results.append(run_app(trial, *where, tell, partial(watcher.expects, trial)))
        watcher.ends(results[-1])
    beside = tuple(against(calibration, by_point(results)) for calibration in calibrations)
    notes = (*one.notes, *(f"Careful: {words}." for words in careful))
    target, over = one.target_accuracy, one.best_over
    found = Results(one.name, tuple(results), target, folder, beside, splits.by_point, notes, over)
    if out is not None:
        found.write(out)
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
