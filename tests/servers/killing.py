"""Coordinator processes that kill (or stop) themselves at a chosen step: just before it, or just after.

The steps are the seams between what a coordinator decides, stores and does. The machine's commands, the kinds of
rounds, an operator's orders and the ways in which an attempt ends are read from the code, so that a new one cannot be
forgotten.
Processes are forked from one that has imported everything already
(`forkserver`): a real process each, that starts within a tenth of a second instead of seconds.
"""

import functools
import inspect
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import httpx

from tests.servers.ports import own_port
from tests.servers.waits import until, until_told
from umbel.aggregation.plans.round import Task
from umbel.aggregation.round.states import Announce, Command, Fold
from umbel.aggregation.run import endings
from umbel.aggregation.run.run_end import RoundEnd
from umbel.aggregation.secagg.unmasking import Unmasker
from umbel.server.blobs.local import LocalBlobs
from umbel.server.devices.admission import Admission
from umbel.server.devices.enrolments import Enrolments
from umbel.server.runs import driver, step
from umbel.server.runs.driver import RunDriver
from umbel.server.runs.orders import Order
from umbel.server.runs.step import Step as RunStep
from umbel.server.serve.process import run
from umbel.server.settings import Settings
from umbel.server.store.deployment import Deployment
from umbel.server.store.locked_run import LockedRun
from umbel.server.store.replicas import RelayStore, Replicas
from umbel.server.store.rounds import RoundStore
from umbel.server.store.uploads import UploadStore
from umbel.server.store.waiters import WaiterStore
from umbel.server.sums import closing, model_files, relay
from umbel.server.sums.closing import Closer
from umbel.server.sums.secure import SecureRounds
from umbel.server.sums.share import ReplicaShare

COMMANDS: tuple[type[Command], ...] = get_args(Command)
ORDERS: tuple[type[Order], ...] = get_args(Order)
NEVER = {(one, task) for one in (Fold, Announce) for task in (Task.CANARY, Task.EVALUATION)}  # they make no model
ENDINGS = tuple(
    name
    for name, one in vars(endings).items()
    if inspect.isfunction(one) and name != "_go_on" and one.__annotations__.get("return") is RoundEnd
)
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


@dataclass(frozen=True, slots=True)
class Step:
    """A method or a function, and which of its calls are meant: those with an argument of type `takes`, if it is given,
    about a round of `task`."""

    owner: type | ModuleType
    method: str
    takes: type | None = None
    task: Task | None = None

    def __post_init__(self) -> None:
        inspect.getattr_static(self.owner, self.method)  # raises for one that has been renamed, as soon as tests load


STEPS: Mapping[str, Step] = {
    "agree on what all coordinators share": Step(Deployment, "settle"),
    "enter the list of replicas": Step(Replicas, "start"),
    "store a run": Step(RoundStore, "add_run"),
    "store an enrolment": Step(Enrolments, "enrol"),
    "store nonces": Step(Admission, "_store"),
    "store who waits": Step(WaiterStore, "_put"),
    "put a blob": Step(LocalBlobs, "put"),
    "store a chunk": Step(UploadStore, "add_chunk"),
    "decide": Step(step, "decide"),  # in the middle of a transaction
    "store what was decided": Step(driver, "take_step"),
    **{f"carry out {command.__name__}": Step(RunDriver, "carry_out", command, Task.TRAINING) for command in COMMANDS},
    "take the lease to close": Step(Closer, "leads"),
    "adopt what a dead replica had folded": Step(RoundStore, "adopt"),
    "post a partial sum": Step(RoundStore, "post_partial_sum"),
    "make the model": Step(Closer, "_make_model"),
    "keep a file of the model": Step(model_files, "keep_model"),
    "store the end of an attempt": Step(LockedRun, "end"),  # in the middle of a transaction
    "remove the updates of an attempt": Step(Closer, "end"),
}
LIFE_STEPS: Mapping[str, Step] = {  # in a run that has all that can happen to one (`whole_life.py`)
    **{f"obey {order.__name__}": Step(RunDriver, "obey", order) for order in ORDERS},
    **{
        f"carry out {command.__name__} of {task.value}": Step(RunDriver, "carry_out", command, task)
        for task in Task
        for command in COMMANDS
        if task is not Task.TRAINING and (command, task) not in NEVER
    },
    **{
        f"decide how it was {name.strip('_')}": Step(endings, name) for name in ENDINGS
    },  # in the middle of a transaction
    "look at the canary": Step(closing, "read_canary"),
}


SECURE_STEPS: Mapping[str, Step] = {  # in a secure round over several replicas
    "hand in a masked sum": Step(RoundStore, "post_partial_sum"),
    "forget masked updates": Step(UploadStore, "forget"),
    "publish the key to seal to": Step(RelayStore, "publish"),
    "hand over what was revealed": Step(RelayStore, "put"),
    "open what was handed over": Step(relay, "open_relayed"),
    "make the secrets": Step(Unmasker, "open"),
}
PHASE_STEPS: Mapping[str, Step] = {  # in a secure round, whoever coordinates
    "check a message": Step(SecureRounds, "check"),
    "check a masked update": Step(SecureRounds, "check_input"),
    "write a masked sum": Step(ReplicaShare, "post"),
    "take revealed shares": Step(SecureRounds, "reveal"),
    "unmask": Step(closing, "unmasked"),
}


@dataclass(frozen=True, slots=True)
class Death:
    """Die before or after the `nth` time that a step is done.

    `once`: of several processes that are to die of this, only the first does, and leaves this file. `by`: the signal.
    """

    step: str
    is_before: bool
    nth: int = 1
    once: Path | None = None
    by: signal.Signals = signal.SIGKILL


def start(settings: Settings, death: Death | None = None) -> ForkServerProcess:
    """A coordinator in a process of its own. It dies with this process, and at the latest when it is told to."""
    process = _CONTEXT.Process(target=_serve, args=(settings.model_dump(), death), daemon=True)
    process.start()
    return process


def of_replicas(n_replicas: int, folder: Path, database_url: str) -> list[Settings]:
    """Replicas of one coordinator: they share the database, the blobs and the keys."""
    return [
        Settings(
            data=folder / f"replica-{i}",
            port=own_port(),
            database_url=database_url,
            blobs=str(folder / "blobs"),
            admin_key_file=folder / "admin.key",
            audit_key_file=folder / "audit.key",
        )
        for i in range(n_replicas)
    ]


async def resume(stopped: Path, settings: Sequence[Settings], processes: Sequence[ForkServerProcess]) -> None:
    """Let a replica that stops itself go on, once others have gone on without it: an attempt has ended since, or all.

    `stopped`: its death's file. Returns when that replica, too, knows of the run's end.
    """
    pid = int(await until("a replica that has stopped itself", lambda: stopped.exists() and stopped.read_text()))
    number = [process.pid for process in processes].index(pid)
    other = settings[number - 1]
    before, _ = await _seen(other)

    async def has_gone_on() -> bool:
        n_ended, is_over = await _seen(other)
        return n_ended > before or is_over

    async def knows_the_end() -> bool:
        return (await _seen(settings[number]))[1]

    await until_told("an attempt that ends without the stopped replica", has_gone_on)
    os.kill(pid, signal.SIGCONT)
    await until_told("the run's end at the replica that was stopped", knows_the_end)


async def _seen(settings: Settings) -> tuple[int, bool]:
    """How many attempts have ended, and whether the run is over, as this coordinator has it."""
    key, url = settings.admin_key_path.read_text().strip(), f"http://127.0.0.1:{settings.port}"
    with suppress(httpx.TransportError):
        async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=5.0) as http:
            answer = await http.get("/v1/admin/runs/demo/progress")
        if answer.is_success:
            progress = answer.json()
            return len(progress["ended"]), progress["run"]["status"] == "finished"
    return 0, False


def _serve(settings: dict[str, Any], death: Death | None) -> None:
    if death is not None:
        _arm(death)
    data = Path(settings["data"])
    data.mkdir(parents=True, exist_ok=True)
    log = os.open(data / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    run(Settings(**settings), "info")


def _arm(death: Death) -> None:
    """Have the step's method kill this process."""
    armed = {**STEPS, **LIFE_STEPS, **SECURE_STEPS, **PHASE_STEPS}[death.step]
    original = inspect.getattr_static(armed.owner, armed.method)
    setattr(armed.owner, armed.method, _deadly(original, armed, death))


def _deadly(original: Callable[..., Any], step: Step, death: Death) -> Callable[..., Any]:
    count = itertools.count(1)

    def is_due(arguments: Sequence[object]) -> bool:
        is_meant = step.takes is None or any(isinstance(one, step.takes) for one in arguments)
        if step.task is not None:
            is_meant &= any(isinstance(one, RunStep) and one.before.plan.task is step.task for one in arguments)
        return is_meant and next(count) == death.nth

    @functools.wraps(original)
    def call(*arguments: Any, **named: Any) -> Any:
        due = is_due(arguments)
        if due and death.is_before:
            _die(death)
        result = original(*arguments, **named)
        if due and not death.is_before:
            _die(death)
        return result

    @functools.wraps(original)
    async def call_async(*arguments: Any, **named: Any) -> Any:
        due = is_due(arguments)
        if due and death.is_before:
            _die(death)
        result = await original(*arguments, **named)
        if due and not death.is_before:
            _die(death)
        return result

    return call_async if inspect.iscoroutinefunction(original) else call


def _die(death: Death) -> None:
    if death.once is not None:
        try:
            death.once.open("x").write(str(os.getpid()))
        except FileExistsError:
            return
    os.kill(os.getpid(), death.by)
