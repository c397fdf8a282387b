"""Whether an experiment extends the one whose runs are in a folder: more rounds, more seeds, or more points of a sweep.

A run with more rounds goes on from its checkpoint, and ends in the same model as one long run. So nothing else that
shapes a run may differ. `best_over` may, because only the summary uses it, and so may `target_accuracy` without
`stop_at_target`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from umbel.aggregation.canonical import canonical
from umbel.aggregation.phrases import some
from umbel.aggregation.run.file import RunFile
from umbel.sim.experiment.file import Experiment, TrialSpec, experiment_of

_COUNT = "rounds.count"
_NOT_COMPARED = ("point", "seed")  # they name the run, and runs are compared by name
_SHOWN, _VALUE_CHARACTERS = 8, 80
_HOW = (
    "An experiment can be extended in its folder by more rounds (rounds.count), seeds or points of the sweep. For "
    "other changes choose another folder (--out)"
)

_HOW_OF_APP = (
    "An experiment of a Flower app can be extended in its folder by more seeds or points of the sweep. For other "
    "changes choose another folder (--out)"
)


def require_extension(folder: Path, before: str, now: Experiment) -> None:
    """Raise `ValueError`, with the keys that differ and both values, unless `now` extends what the folder holds.

    `before`: the text of the folder's experiment.
    """
    try:
        table: dict[str, Any] = json.loads(before)
        earlier = {_key(one): one for one in experiment_of(table, folder=now.folder).trials}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{folder} holds another experiment, which this version of umbel cannot read ({error}); choose another "
            "folder (--out)"
        ) from error
    runs = {_key(one): one for one in now.trials}
    unlike = dict[str, tuple[object, object]]()
    if any(key not in runs for key in earlier):
        unlike |= _of_lists(table, json.loads(now.text))
    for key, one in earlier.items():
        if key in runs:
            unlike |= differences(one, runs[key])
            _require_same_course(folder, one.run, runs[key].run)
    if unlike:
        words = some(
            [f"{key} is {_shown(old)} there, and {_shown(new)} here" for key, (old, new) in unlike.items()], _SHOWN
        )
        is_of_app = all(one.flower is not None for one in now.trials)
        raise ValueError(f"{folder} holds another experiment: {words}. {_HOW_OF_APP if is_of_app else _HOW}")


def _key(trial: TrialSpec) -> tuple[str, int]:
    """The run's point and seed. In canonical text 1.0 is 1, and so it is in an experiment that was read from that."""
    return canonical(dict(trial.point)), trial.seed


def differences(before: TrialSpec, now: TrialSpec) -> dict[str, tuple[object, object]]:
    """The settings by which two runs differ, by dotted key, with both values; without more rounds than before."""
    old, new = (_settings(one) for one in (before, now))
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    more = before.run.rounds.count < now.run.rounds.count
    return {key: (old.get(key), new.get(key)) for key in keys if not (key == _COUNT and more)}


def _settings(trial: TrialSpec) -> dict[str, object]:
    """What shapes the run, by dotted key, as a file says it."""
    found = dict(_flat({key: value for key, value in asdict(trial).items() if key not in _NOT_COMPARED}))
    stops_at = found["stop_at_target"]
    return {**found, "stop_at_target": False if stops_at is None else f"true, with a target_accuracy of {stops_at:g}"}


def _require_same_course(folder: Path, before: RunFile, now: RunFile) -> None:
    """Raise `ValueError` for more rounds in a run whose first rounds depend on their number."""
    count, more = before.rounds.count, now.rounds.count
    if more <= count:
        return
    if now.privacy is not None:
        why = "the noise of [privacy] is planned for all rounds together"
    elif any(before.training_plan(n).learning_rate != now.training_plan(n).learning_rate for n in range(1, count + 1)):
        why = "the learning rate of [training.schedule] depends on the number of rounds"
    elif any(_server_rate(before, n) != _server_rate(now, n) for n in range(1, count + 1)):
        why = "the server's learning rate of [aggregation.schedule] depends on the number of rounds"
    else:
        return
    raise ValueError(
        f"the runs in {folder} have rounds.count = {count}, and {more} rounds would be other runs from the first round "
        f"on, because {why}; choose another folder (--out)"
    )


def _server_rate(file: RunFile, number: int) -> float:
    return file.aggregation.rate(number, file.rounds.count, file.rounds_of(number).target)


def _of_lists(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[object, object]]:
    """Seeds and sweep, where they differ: runs of the folder are missing in the new ones."""
    pairs = {key: (before.get(key), now.get(key)) for key in ("seeds", "sweep")}
    return {key: (old, new) for key, (old, new) in pairs.items() if old != new}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every value of nested tables by its dotted key, as an experiment's file writes it."""
    for key, value in table.items():
        if isinstance(value, dict):
            is_run = key == "run" and not prefix  # keys of the run file are at the top
            yield from _flat(cast(Mapping[str, Any], value), prefix if is_run else f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: object) -> str:
    text = "not set" if value is None else json.dumps(value, default=str)
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[: _VALUE_CHARACTERS - 1]}…"
