"""A canary in an experiment is judged as a coordinator judges it, and what it finds decides whether the run begins."""

from pathlib import Path
from typing import Any

import pytest

from tests.sim.federation.worlds import attempts_of, hashes, table
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.plans.round import Task
from umbel.aggregation.run.records import Fate
from umbel.sim.console import run
from umbel.sim.experiment.trials import Estimate
from umbel.sim.simulation import simulate

SLOW_EXPERIMENT = """
name = "small"
[data]
name = "digits"
[partition]
scheme = "iid"
clients = 30
[model]
hidden = [8]
[fleet.speed]
step_s = 1000.0
spread = 0.0
[rounds]
count = 2
target = 6
window_s = 300
[canary]
clients = 4
"""
SLOW = {"speed": {"step_s": 100.0, "spread": 0.0, "jitter": 0.0}}


def tried(**changes: Any) -> dict[str, Any]:
    """The small experiment with a canary of four clients."""
    rounds = {"count": 2, "window_s": 300.0} | changes.pop("rounds", {})
    return table(canary={"clients": 4, "share": 0.2} | changes.pop("canary", {}), rounds=rounds, **changes)


def test_a_canary_that_passes_is_followed_by_the_first_round() -> None:
    canary, *rounds = attempts_of(tried())
    assert canary.record.task is Task.CANARY
    assert canary.record.committed
    assert "4 of 4 clients pass the canary" in canary.record.reason
    assert all("a whole round takes" in client.reason for client in canary.record.clients)
    assert all("peak memory" not in client.reason for client in canary.record.clients), "nobody has measured that"
    assert simulate(tried()).points[0].rounds == Estimate(2.0, None, None, 1), "it is no round of the run"
    assert [(one.record.round, one.record.task) for one in rounds] == [(1, Task.TRAINING), (2, Task.TRAINING)]


def test_a_canary_does_a_share_of_the_work_and_leaves_the_model_as_it_was() -> None:
    described = tried(training={"local_epochs": 5})
    canary, first, *_ = attempts_of(described)
    assert canary.record.model_version == 0
    assert canary.model.file != first.model.file
    asked = [client.steps_planned for client in canary.record.clients]
    assert all(0 < steps < 25 for steps in asked)
    trained = [one.model.file.sha256 for one in attempts_of(described) if one.record.task is Task.TRAINING]
    assert trained == hashes({key: section for key, section in described.items() if key != "canary"})


@pytest.mark.parametrize(("on_failure", "status"), [("pause", RunStatus.PAUSED), ("stop", RunStatus.FAILED)])
def test_a_canary_that_fails_ends_the_experiment_with_the_cause(on_failure: str, status: RunStatus) -> None:
    ended = attempts_of(tried(fleet=SLOW, canary={"on_failure": on_failure}))
    assert len(ended) == 1
    assert not ended[0].record.committed
    assert ended[0].standing.status is status
    assert "the canary has failed: 0 of 4 clients pass" in ended[0].standing.reason
    assert "window_s of at least" in ended[0].standing.reason
    assert {client.fate for client in ended[0].record.clients} == {Fate.UNFIT}


def test_a_run_that_widens_goes_on_after_a_canary_that_fails() -> None:
    ended = attempts_of(tried(fleet=SLOW, canary={"on_failure": "widen"}))
    assert not ended[0].record.committed
    assert [one.record.round for one in ended[1:] if one.record.committed] == [1, 2]


def test_changes_too_near_to_the_bound_are_found() -> None:
    (ended,) = attempts_of(tried(aggregation={"max_abs": 0.2}))
    assert "too near to max_abs 0.2" in ended.standing.reason
    assert "beyond the grid's max_abs 0.2" in ended.standing.reason


@pytest.mark.parametrize("codec", [{"name": "integer", "step": 0.5}, {"name": "topk", "share": 0.1}])
def test_updates_of_a_canary_are_written_and_read_as_the_run_says(codec: dict[str, Any]) -> None:
    plain, coded = attempts_of(tried()), attempts_of(tried(codec=codec))
    assert coded[0].record.committed
    assert coded[0].record.bytes_up < plain[0].record.bytes_up


def test_who_sends_rubbish_or_nothing_does_not_pass() -> None:
    fleet = {"corrupt": {"share": 0.7, "kinds": ["nan", "length"]}, "dropouts": {"per_round": 0.3}}
    (ended,) = attempts_of(tried(fleet=fleet, rounds={"target": 12}, canary={"clients": 12, "minimum": 12}))
    reasons = " ".join(client.reason for client in ended.record.clients if client.fate is not Fate.ACCEPTED)
    assert "diverged" in reasons
    assert "wrong length" in reasons
    assert "had not reported" in reasons
    assert 0 < ended.record.reported < 12


def test_an_experiment_whose_canary_fails_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.toml"
    file.write_text(SLOW_EXPERIMENT)
    results = run(file, tmp_path / "out", None, {}, quiet=False)
    assert results.summary()["runs"][0]["status"] == "paused"
    told = " ".join(capsys.readouterr().out.split())
    assert "paused: the canary has failed: 0 of 4 clients pass" in told
    again = simulate(file, tmp_path / "out")
    assert [one.reason for one in again.trials] == [one.reason for one in results.trials]
    assert len(list(again.rows)) == 1
