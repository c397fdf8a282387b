"""A run that ends at its target accuracy is the beginning of a longer run, however it was interrupted."""

from pathlib import Path
from typing import Any

import pytest

from tests.sim.federation.worlds import table
from umbel.sim import simulate
from umbel.sim.experiment.file import experiment_of
from umbel.sim.experiment.trials import TrialResult
from umbel.sim.federation.rows import Row

pytestmark = pytest.mark.slow
TARGET = 0.3
WHOLE: dict[str, Any] = {
    "rounds": {"count": 8},
    "training": {"local_epochs": 2, "learning_rate": 0.5},
    "target_accuracy": TARGET,
}
STOPS = {**WHOLE, "stop_at_target": True}


def one(described: dict[str, Any], folder: Path | None = None) -> TrialResult:
    (found,) = simulate(described, folder).trials
    return found


def accuracies(result: TrialResult) -> list[float | None]:
    return [row.accuracy for row in result.rows]


def has_target(row: Row) -> bool:
    return row.accuracy is not None and row.accuracy >= TARGET


def test_a_run_ends_after_the_first_model_with_the_target_accuracy() -> None:
    whole, stopped = one(table(**WHOLE)), one(table(**STOPS))
    n_rows = len(stopped.rows)
    assert n_rows < len(whole.rows)
    assert accuracies(stopped) == accuracies(whole)[:n_rows]
    assert [has_target(row) for row in stopped.rows] == [False] * (n_rows - 1) + [True]
    assert (stopped.status.value, stopped.reason) == ("finished", "the model has the target accuracy of 0.3")


def test_it_stays_where_it_ended_when_it_is_resumed_or_has_more_rounds(tmp_path: Path) -> None:
    first = one(table(**STOPS), tmp_path)
    assert accuracies(one(table(**STOPS), tmp_path)) == accuracies(first)
    longer = one(table(**{**STOPS, "rounds": {"count": 20}}), tmp_path)
    assert accuracies(longer) == accuracies(first)
    assert longer.model_sha256 == first.model_sha256


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_accuracy": 0.35}, '"true, with a target_accuracy of 0.35" here'),
        ({"stop_at_target": False}, "false here"),
    ],
)
def test_another_end_needs_another_folder(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    one(table(**STOPS), tmp_path)
    with pytest.raises(ValueError, match=f'is "true, with a target_accuracy of 0.3" there, and {words}'):
        simulate(table(**{**STOPS, **changes}), tmp_path)


def test_a_run_that_never_has_the_target_ends_after_its_last_round() -> None:
    never = one(table(**{**STOPS, "target_accuracy": 1.0, "rounds": {"count": 2}}))
    assert (len(never.rows), never.status.value) == (2, "finished")


def test_without_a_target_there_is_nothing_to_stop_at() -> None:
    with pytest.raises(ValueError, match="the target_accuracy, which is missing"):
        experiment_of(table(stop_at_target=True))
