"""The client in rounds, as in production: `run_client` against a coordinator in memory, with a state directory."""

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from umbel.aggregation.model.layout import Layout
from umbel.client.check.cohort import PEERS, SecureCheckCoordinator
from umbel.client.check.coordinator import ADDRESS, TOKEN, CheckCoordinator
from umbel.client.check.observed import ObservedClient, ObservedPlan, ObservedTraining
from umbel.client.check.plan_checks import STOP_AFTER, out_of_time
from umbel.client.check.practice_run import CLIENT, SEED, PracticeRun
from umbel.client.errors import ClientError
from umbel.client.findings import ClientFinding, passed, skipped, warned, wrong
from umbel.client.local.checkpoint import Checkpoint
from umbel.client.local.plan import LocalPlan
from umbel.client.loop import RunEnd, run_client
from umbel.client.user_code import where_raised

ROUNDS_VALUES_MAX = 200_000_000
"""The most values of an update in rounds: the coordinator holds some ten copies of it in memory."""
SECURE_VALUES_MAX = 20_000_000
"""The most values of a masked update: three clients mask theirs here, one after another."""
_LOG = logging.getLogger("umbel.client")


@dataclass(frozen=True, slots=True)
class CheckedRounds:
    """What the checks of rounds need."""

    run: PracticeRun
    layout: Layout
    start: Path
    folder: Path
    ignored: frozenset[str]  # keys that the client ignores: its rounds do not ask for them


def too_large(check: str, n_values: int, most: int) -> ClientFinding | None:
    """The finding that skips this check of an update with so many values; None if it is small enough."""
    if n_values <= most:
        return None
    return skipped(check, f"the update has {n_values:,} values, and this check takes at most {most:,} into memory")


def check_rounds(rounds: CheckedRounds, client: ObservedClient) -> ClientFinding:
    """Two rounds, the second one with partial work, unless the client trains in one call."""
    if (large := too_large("rounds", rounds.layout.update.n_values, ROUNDS_VALUES_MAX)) is not None:
        return large
    codec = rounds.run.codec(rounds.ignored, rounds.layout.update.n_values)
    file = rounds.run.of_rounds(rounds.ignored)
    coordinator = CheckCoordinator(file, rounds.layout, rounds.start.read_bytes(), codec, SEED)
    if not client.app.trains_in_one_call:  # such a client asks as often as it has to wait: more on a slow machine
        client.alter = lambda plan: out_of_time(plan) if plan.round == 2 else plan
    came = _take_part(client, coordinator, rounds.folder / "rounds")
    if came.error or len(coordinator.reports) < 2:
        found = f"the client has sent {len(coordinator.reports)} of 2 reports: {came.words}"
        return wrong("rounds", found, "Correct what this sentence names")
    steps = ", then ".join(f"{work.steps_done} of {work.steps_planned}" for work in coordinator.reports)
    return passed("rounds", f"both reports of two rounds were accepted, with {steps} steps")


def check_secure(rounds: CheckedRounds, client: ObservedClient) -> ClientFinding:
    """One secure round with two other clients."""
    if (large := too_large("secure", rounds.layout.update.n_values, SECURE_VALUES_MAX)) is not None:
        return large
    file = rounds.run.secure(rounds.ignored, client.sample_count)
    coordinator = SecureCheckCoordinator(file, rounds.layout, rounds.start.read_bytes(), SEED)
    came = _take_part(client, coordinator, rounds.folder / "secure")
    if came.error or coordinator.totals is None:
        found = f"the client did not take part in a secure round: {came.words}"
        return wrong("secure", found, "Correct what this sentence names")
    return passed("secure", f"the client's masked update was added to those of {len(PEERS)} others, and unmasked")


# --- a kill -----------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Ends a training as a kill would; no `Exception`, so that no code of the client swallows it."""


class _KillingCheckpoint(Checkpoint):
    """Is due after `STOP_AFTER` steps, and ends the training when it has saved."""

    def __init__(self, kept: Checkpoint) -> None:
        self._kept, self._asked = kept, 0

    def is_due(self) -> bool:
        self._asked += 1
        return self._asked >= STOP_AFTER

    def save(self, state: Mapping[str, object]) -> None:
        self._kept.save(state)
        raise Killed

    def load(self) -> dict[str, Any] | None:
        return self._kept.load()


def _killed(plan: ObservedPlan) -> LocalPlan:
    return replace(plan, checkpoint=_KillingCheckpoint(plan.checkpoint))


def check_resumes(
    rounds: CheckedRounds, client: ObservedClient, resumed: ObservedClient, baseline: ObservedTraining
) -> ClientFinding:
    """Kill a training of `client` in the middle, and let `resumed`, which was made anew, resume it.

    `baseline`: the same training, undisturbed.
    """
    if (large := too_large("resume", rounds.layout.update.n_values, ROUNDS_VALUES_MAX)) is not None:
        return large
    file, folder = rounds.run.of_kill(), rounds.folder / "kill"
    codec = file.first_plan(rounds.layout.update.n_values).codec
    coordinator = CheckCoordinator(file, rounds.layout, rounds.start.read_bytes(), codec, SEED)
    client.alter = _killed
    try:
        came = _take_part(client, coordinator, folder)
    except Killed:
        return _resumed(rounds, resumed, coordinator, baseline)
    if came.error or not coordinator.reports:
        return wrong("resume", f"the client has sent no report: {came.words}", "Correct what this sentence names")
    begins_anew = "train saves no checkpoint, so a killed training begins anew"
    return skipped("resume", begins_anew) if client.app.trains_in_one_call else warned("resume", begins_anew, _KEEP)


_KEEP = 'Iterate over plan.drive(data, keep={"model": model, "optimizer": optimizer}), with all that a step changes'


def _resumed(
    rounds: CheckedRounds, client: ObservedClient, coordinator: CheckCoordinator, baseline: ObservedTraining
) -> ClientFinding:
    came = _take_part(client, coordinator, rounds.folder / "kill")
    if came.error or not coordinator.reports:
        return wrong("resume", f"after a kill, the client has sent no report: {came.words}", _KEEP)
    resumed, (work,) = client.trainings[-1], coordinator.reports
    if resumed.after != baseline.after:
        found = (
            f"a training that was killed after {STOP_AFTER} steps and resumed gives other weights than one that was not"
        )
        return wrong("resume", found, _KEEP)
    if work.steps_done != rounds.run.steps:
        found = f"a resumed training says that it did {work.steps_done} steps, not {rounds.run.steps}"
        return wrong("resume", found, "Count the steps before the kill too, as plan.drive does")
    if resumed.doings.steps >= rounds.run.steps:
        return warned("resume", "a killed training begins anew, although it saves checkpoints", _KEEP)
    return passed("resume", f"a training that was killed after {STOP_AFTER} steps resumes to the same weights")


# --- taking part ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Came:
    """How a run has ended for the client. `error`: what has ended it; empty if it ended by itself."""

    error: str
    words: str


def _take_part(client: ObservedClient, coordinator: CheckCoordinator, folder: Path) -> _Came:
    """Run the client's loop to its end. Its log goes to what is returned."""
    with logged() as records:
        try:
            end = _run(client, coordinator, folder)
            if end.status == "interrupted" and not coordinator.declined:
                raise KeyboardInterrupt(end.reason)
            error = "" if end.status == "finished" else end.reason
        except ClientError as raised:
            error = str(raised)
    errors = [_words(one) for one in records if one.levelno >= logging.ERROR]
    warnings = [one.getMessage() for one in records if one.levelno < logging.ERROR]
    reasons = [*errors, coordinator.declined, *reversed(warnings), error, "the reason is unknown"]
    return _Came(error, next(filter(None, reasons)))


def _words(record: logging.LogRecord) -> str:
    """The line of the log. Where it has a traceback, also the line of the client's code that raised the error."""
    line, error = record.getMessage(), record.exc_info[1] if record.exc_info else None
    place = "" if error is None else where_raised(error)
    return line if place in line else f"{line}: {place}"


def _run(client: ObservedClient, coordinator: CheckCoordinator, folder: Path) -> RunEnd:
    token = None if folder.exists() else TOKEN
    run, transport = coordinator.file.name, coordinator.transport()
    return run_client(client, ADDRESS, folder, run, token, CLIENT, transport=transport, shutdown=coordinator.shutdown)


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def logged() -> Generator[list[logging.LogRecord]]:
    """Collect warnings and errors of the client's log in this block, in place of showing them."""
    handler = _Collector()
    before = _LOG.propagate
    _LOG.addHandler(handler)
    _LOG.propagate = False
    try:
        yield handler.records
    finally:
        _LOG.propagate = before
        _LOG.removeHandler(handler)
