"""What attempts of a ServerApp note of the nodes' replies."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is in the environment of the Flower tests only (make test)")

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from umbel.aggregation.plans.round import Task
from umbel.aggregation.types import METRICS_MAX
from umbel.sim.engines.flower.work import NodeAnswer
from umbel.sim.experiment.file import experiment_of
from umbel.sim.fleet.build import devices_of
from umbel.sim.flower.attempts import Answers, Asked, Attempts, PlayedAttempt, numbers_of


def attempts_of(sample_count_max: int = 1 << 20) -> Attempts:
    (trial,) = experiment_of({"name": "x", "flower": {"app": ".", "clients": 3, "samples": 500}}).trials
    run = replace(trial.run, aggregation=replace(trial.run.aggregation, sample_count_max=sample_count_max))
    return Attempts(run, devices_of(None, 0, Path(), None), 500)


def play(attempts: Attempts, numbers: Sequence[float | None], task: Task = Task.TRAINING) -> PlayedAttempt:
    """An attempt at nodes which say these numbers of samples; None: nothing."""
    nodes = range(len(numbers))

    def work(called: Sequence[int]) -> Answers:
        said = {node: {} if (number := numbers[node]) is None else {"num-examples": number} for node in called}
        return {node: NodeAnswer(RecordDict({"m": MetricRecord(one)}), b"") for node, one in said.items()}

    return attempts.play(Asked(task, 1, nodes, [10] * len(nodes), None), work)


@pytest.mark.parametrize("task", [Task.TRAINING, Task.EVALUATION])
def test_a_number_of_samples_that_no_record_takes_is_as_none_and_said_once(
    caplog: pytest.LogCaptureFixture, task: Task
) -> None:
    attempts = attempts_of()
    with caplog.at_level(logging.WARNING, "umbel.sim"):
        odd = play(attempts, [2**62, 0, -7, 0.5, 40.0, None], task)
        play(attempts, [2**62, 0, -7, 0.5, 40.0, None], task)
    assert (odd.record.reported, odd.record.sample_count, odd.samples) == (6, 5 * 500 + 40, None)
    assert [one.message for one in caplog.records] == [
        "node 0 says num-examples = 4.61169e+18, and umbel's records take 1 to 2^40: they have an estimate in its "
        "place. The ServerApp gets the reply as it is"
    ]


def test_samples_are_known_once_every_node_that_was_asked_has_said_how_many_it_has() -> None:
    attempts = attempts_of()
    assert play(attempts, [10, None]).samples is None
    assert play(attempts, [10, 30]).samples == (40, 0)
    assert play(attempts, [None, None]).samples == (40, 0)
    assert play(attempts, [10, 30], Task.EVALUATION).samples == (40, 0), "of other data"


def test_a_round_has_as_many_nodes_as_it_may_have_samples() -> None:
    assert play(attempts_of(sample_count_max=1 << 38), [10, 20, 30]).record.sample_count == 60


def test_many_metrics_do_not_hide_the_number_of_samples() -> None:
    many = {f"a{i}": 1.0 for i in range(2 * METRICS_MAX)}
    found = numbers_of(RecordDict({"m": MetricRecord({"num-examples": 3, **many}), "c": ConfigRecord()}))
    assert found.pop("num-examples") == 3
    assert len(found) == METRICS_MAX
