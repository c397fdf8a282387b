"""One simulated run of a Flower app, from the start of its ServerApp to its end; it cannot be resumed in between.

```
<folder>/rounds.jsonl             a line for each ended attempt
<folder>/model.safetensors        the last model, if the app has shown it
<folder>/finished.json            of a run that is over: how it ended, and the SHA-256 of what it was made of
```
"""

import json
import logging
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flwr.serverapp import ServerApp
from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.round import Task
from umbel.client.files import write_atomically
from umbel.client.flower.calls import AppFailed
from umbel.client.flower.host import load_object, modules_of
from umbel.client.flower.local_grid import run_server_app
from umbel.client.flower.project import FlowerProject
from umbel.client.local.devices import seed_generators
from umbel.client.user_code import where_raised
from umbel.sim.engines.flower.choose import flower_engine
from umbel.sim.engines.flower.work import NodeApp
from umbel.sim.engines.work import EngineError
from umbel.sim.experiment.checkpoint import MODEL_FILE, ROWS_FILE, CheckpointError
from umbel.sim.experiment.file import TrialSpec
from umbel.sim.experiment.last_model import LastModel
from umbel.sim.experiment.trials import TrialResult
from umbel.sim.federation.possible import SimulationError
from umbel.sim.federation.rows import Row, row_of
from umbel.sim.fleet.build import devices_of
from umbel.sim.flower.attempts import Attempts
from umbel.sim.flower.grid import SimulatedGrid
from umbel.sim.flower.models import last_model
from umbel.sim.flower.project import digest_of, project_of
from umbel.sim.flower.rows import FlowerRows
from umbel.sim.flower.watching import Observed, watching

FINISHED_FILE = "finished.json"
log = logging.getLogger("umbel.sim")


@dataclass(frozen=True, slots=True)
class _Ended:
    """How a run has ended. `app_sha256`: of the app's files when it ran."""

    app_sha256: str
    wall_s: float
    engine: str
    engine_why: str
    model_sha256: str


_ENDED = TypeAdapter(_Ended)


def _of_rounds(trial: TrialSpec, count: int) -> TrialSpec:
    return replace(trial, run=replace(trial.run, rounds=replace(trial.run.rounds, count=count)))


def run_app(
    trial: TrialSpec,
    folder: Path | None,
    base: Path,
    data: Path | None,
    tell: Callable[[Row], None],
    expect: Callable[[int], None],
) -> TrialResult:
    """Simulate one run of the app to its end. `expect`: is told how many rounds the app asks for, if that is known. The
    other arguments are as for `run_trial`.

    A run whose app fails has failed, and the next run of the experiment goes on. Raises `ValueError`, `OSError`, and
    `CheckpointError` for a run that ended in this folder with other code of the app.
    """
    assert trial.flower is not None, "a trial of an app has its section"
    project = project_of(trial.flower, base)
    digest = digest_of(project.folder)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        if (before := _read(trial, folder, digest)) is not None:
            return before
    began, rows = time.perf_counter(), list[Row]()

    def told(row: Row) -> None:
        rows.append(row)
        if folder is not None:
            with (folder / ROWS_FILE).open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
        tell(row)

    fleet = None if trial.fleet is None else replace(trial.fleet, partial_work=False)  # a call cannot be cut short
    devices = devices_of(fleet, trial.seed, base, data)
    app = NodeApp(str(project.folder), project.component("clientapp"), project.run_config, trial.flower.clients)
    shown, attempts = FlowerRows(told), Attempts(trial.run, devices, trial.flower.samples)
    seen, arrays, failure = Observed(shown.score, expect), None, ""
    engine_name, engine_why = str(trial.engine.name), ""
    try:
        with (
            modules_of(project.folder, project.components.values()),
            closing(flower_engine(trial.engine.name, app, trial.engine.workers)) as engine,
        ):
            grid = SimulatedGrid(attempts, engine, shown, trial.flower.clients, trial.seed)
            with closing(grid), _flowers_log_kept_short(), watching(grid, seen):
                _serve(project, grid, trial.seed)
            engine_name, engine_why = engine.name, engine.why
            arrays = seen.arrays if seen.arrays is not None else grid.arrays
            grid.warn_of(arrays)
    except (EngineError, SimulationError) as error:
        failure = str(error)
    model, body = last_model(arrays)
    shown.flush(model.sha256 or None)
    failure = failure or _why_no_model(rows)
    ended = _Ended(digest, time.perf_counter() - began, engine_name, engine_why, model.sha256)
    if folder is not None and not failure:
        if body is not None:
            write_atomically(folder / MODEL_FILE, body)
            model = LastModel(model.sha256, file=(folder / MODEL_FILE).absolute())
        write_atomically(folder / FINISHED_FILE, _ENDED.dump_json(ended))
    return _result(trial, rows, ended, model, failure)


def _why_no_model(rows: Sequence[Row]) -> str:
    """Why the rounds have made no model; empty if they have, or were only to measure one."""
    if not rows:
        return "the ServerApp has ended, and asked no node to train or to evaluate"
    training = [row for row in rows if Task(row.task).makes_model]
    if training and not any(row.committed for row in training):
        return "no node replied in time in any round, so no model was made: set a longer rounds.window_s"
    return ""


def _serve(project: FlowerProject, grid: SimulatedGrid, seed: int) -> None:
    name = project.component("serverapp")
    seed_generators(seed)  # so that the first model is that of `umbel model init --seed`
    try:
        run_server_app(load_object(name, ServerApp, project.folder), grid, project.run_config)
    except AppFailed as error:
        raise EngineError(str(error)) from error
    except (EngineError, SimulationError):
        raise
    except KeyboardInterrupt:  # of the user
        raise
    except BaseException as error:  # whatever the app raises
        log.error("the ServerApp failed\n%s", "".join(traceback.format_exception(error)).rstrip())
        raise EngineError(f"the ServerApp {name} failed with {where_raised(error)}") from error


@contextmanager
def _flowers_log_kept_short() -> Generator[None]:
    """Rounds have rows, and a progress bar: Flower's own lines about them would only interrupt it."""
    flowers = logging.getLogger("flwr")
    before = flowers.level
    flowers.setLevel(logging.WARNING)
    try:
        yield
    finally:
        flowers.setLevel(before)


def _read(trial: TrialSpec, folder: Path, app_sha256: str) -> TrialResult | None:
    """The result of a run that ended here before. What an interrupted run has left is removed."""
    path = folder / FINISHED_FILE
    if not path.exists():
        (folder / ROWS_FILE).unlink(missing_ok=True)
        return None
    try:
        finished = _ENDED.validate_json(path.read_bytes())
        rows = [row_of(json.loads(line)) for line in (folder / ROWS_FILE).read_text().splitlines()]
    except (ValidationError, ValueError, TypeError, OSError) as error:
        raise CheckpointError(f"{path} or {ROWS_FILE} beside it is damaged; remove {folder} to start again") from error
    if finished.app_sha256 != app_sha256:
        raise CheckpointError(
            f"the app's code changed since its run in {folder} ended (by SHA-256); choose another folder (--out)"
        )
    kept = LastModel(finished.model_sha256, file=(folder / MODEL_FILE).absolute())
    return _result(trial, rows, finished, kept if finished.model_sha256 else LastModel("", {}))


def _result(trial: TrialSpec, rows: list[Row], ended: _Ended, model: LastModel, failure: str = "") -> TrialResult:
    assert trial.flower is not None, "a trial of an app has its section"
    n_rounds = len({row.round for row in rows if row.makes_model})
    return TrialResult(
        trial=_of_rounds(trial, max(1, n_rounds)),
        rows=tuple(rows),
        status=RunStatus.FAILED if failure else RunStatus.FINISHED,
        reason=failure or f"the ServerApp has ended after {counted(n_rounds, 'round')}",
        model_sha256=ended.model_sha256,
        wall_s=ended.wall_s,
        engine=ended.engine,
        engine_why=ended.engine_why,
        n_clients=trial.flower.clients,
        model=model,
    )
