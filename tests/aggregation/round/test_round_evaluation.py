"""Rounds that measure instead of training, and runs that were paused: the machine, by examples; and their run files."""

from dataclasses import replace

import pytest

from umbel.aggregation.messages import Outcome
from umbel.aggregation.plans.assignment import assignment_id
from umbel.aggregation.plans.round import Task
from umbel.aggregation.plans.training import TrainingSection
from umbel.aggregation.reports import EvaluationDone
from umbel.aggregation.round.machine import advance
from umbel.aggregation.round.states import (
    Abandoned,
    Answer,
    Applied,
    Closing,
    Commit,
    Committed,
    Fold,
    Gathered,
    Invite,
    Recruiting,
    Reported,
    Resumed,
    Stopped,
    Training,
)
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import EvaluationSection, Override, RetentionSection, RoundsSection
from umbel.aggregation.run.stopping import StopRule
from umbel.aggregation.types import ClientId, RunId

FILE = RunFile("demo", RoundsSection(9, target=5, window_s=100.0), evaluation=EvaluationSection(3, 2, 60.0))
PLAN = FILE.evaluation_plan(6)
NORTH, SOUTH, EAST = ClientId("north"), ClientId("south"), ClientId("east")
WAITING = tuple(Candidate(client, 10) for client in (NORTH, SOUTH, EAST))
ASKED = Recruiting(PLAN, since=1000.0, excluded=(NORTH,))


def test_who_trained_is_not_asked_and_nothing_is_folded() -> None:
    opened, commands = advance(ASKED, Gathered(1001.0, WAITING))
    opened, commands = (opened, commands) if commands else advance(opened, Gathered(1007.0, WAITING))
    assert isinstance(opened, Training)
    assert commands == (Invite((EAST, SOUTH)),)
    state, commands = advance(opened, Reported(1010.0, EAST, EvaluationDone(30, {"loss": 1.0})))
    assert commands == (Answer(EAST, Outcome.ACCEPTED, "the report counts"),)
    closing, commands = advance(state, Reported(1011.0, SOUTH, EvaluationDone(10, {"loss": 2.0})))
    assert isinstance(closing, Closing)
    assert not any(isinstance(command, Fold) for command in commands)
    assert commands[-1] == Commit()
    assert closing.aggregate.sample_count == closing.aggregate.total_weight == 40
    done, _ = advance(closing, Applied(1012.0, "ab" * 32))
    assert done == Committed(closing, "ab" * 32)


def test_an_evaluation_waits_for_nobody_beyond_its_patience() -> None:
    patience_s = PLAN.patience_s
    only_north = WAITING[:1]
    state, commands = advance(ASKED, Gathered(1000.0 + patience_s - 0.1, only_north))
    assert isinstance(state, Recruiting)
    assert not commands
    state, _ = advance(state, Gathered(1000.0 + patience_s, only_north))
    assert isinstance(state, Abandoned)
    assert state.reason.startswith("there is nobody to measure the model: ")


def test_training_waits_for_as_long_as_it_takes() -> None:
    state, _ = advance(Recruiting(FILE.round_plan(1, 1), since=0.0), Gathered(1e6, ()))
    assert isinstance(state, Recruiting)


def test_patience_begins_anew_when_a_run_is_resumed() -> None:
    resumed, commands = advance(Recruiting(FILE.round_plan(1, 1), since=0.0), Resumed(5000.0))
    assert not commands
    state, _ = advance(resumed, Gathered(5001.0, WAITING))
    assert isinstance(state, Recruiting), "three of seven wait, and the others have just been told"
    state, _ = advance(state, Gathered(5011.0, WAITING))
    assert isinstance(state, Training)


@pytest.mark.parametrize("event", [Resumed(2000.0), Gathered(2000.0, WAITING)])
def test_a_resumption_means_nothing_to_a_round_that_is_open_or_over(event: Resumed | Gathered) -> None:
    opened, _ = advance(Recruiting(FILE.round_plan(1, 1), since=0.0), Gathered(11.0, WAITING))
    assert advance(opened, event) == (opened, ())
    over, _ = advance(opened, Stopped(12.0, "enough"))
    assert advance(over, event) == (over, ())


def test_an_evaluation_is_told_from_the_round_that_it_follows() -> None:
    assert (PLAN.task, PLAN.number, PLAN.attempt, PLAN.window_s) == (Task.EVALUATION, 6, 1, 60.0)
    assert [number for number in range(1, 10) if FILE.evaluates_after(number)] == [3, 6, 9]
    assert assignment_id(RunId("demo"), 6, 1, NORTH, Task.EVALUATION) == "demo.6.e1.north"
    assert assignment_id(RunId("demo"), 6, 1, NORTH) == "demo.6.1.north"


STOP = StopRule("evaluation.loss", patience=3)
ROUNDS = RoundsSection(9, target=5)
TWO = RoundsSection(9, target=2)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: EvaluationSection(0, 3), "every must lie between 1 and 1000000, not 0"),
        (lambda: RunFile("x", ROUNDS, evaluation=EvaluationSection(1, 0)), "clients must lie between 1"),
        (lambda: RunFile("x", ROUNDS, evaluation=EvaluationSection(1, 1, 0.0)), "window_s must lie between"),
        (lambda: RunFile("x", ROUNDS, stop=STOP), "evaluation.loss is never measured: set evaluate = true"),
        (
            lambda: RunFile("x", TWO, stop=StopRule("training.loss", patience=3)),
            "at most 2 are asked: ask more, or set",
        ),
        (
            lambda: RunFile("x", ROUNDS, stop=STOP, evaluation=EvaluationSection(1, 2)),
            "evaluation.loss counts only if at least 3 clients measure it, but at most 2 are asked",
        ),
        (lambda: RetentionSection(0), 'versions, if not "all", must lie between 1 and'),
    ],
)
def test_a_run_file_whose_life_cycle_makes_no_sense_is_refused(make: object, sentence: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=sentence):
        make()


def test_a_metric_is_measured_where_the_file_says_so() -> None:
    RunFile("x", ROUNDS, stop=STOP, training=TrainingSection(evaluate=True))
    RunFile("x", ROUNDS, stop=STOP, evaluation=EvaluationSection(1, 3))
    RunFile("x", TWO, stop=replace(STOP, minimum=2), training=TrainingSection(evaluate=True))
    RunFile("x", TWO, stop=STOP, training=TrainingSection(evaluate=True), override=(Override(2, 3, target=3),))
    RunFile("x", ROUNDS, stop=StopRule("training.loss", target=0.1))
    assert RetentionSection().n_versions is None
    assert RetentionSection(4).n_versions == 4


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"sample_count": 0, "evaluation": {"loss": 1.0}}, "sample_count must lie between"),
        ({"sample_count": 1, "evaluation": {"loss": float("nan")}}, "leave out what is not a number"),
        ({"sample_count": 1, "evaluation": {}, "evaluate_s": -1.0}, "evaluate_s must be finite"),
    ],
)
def test_an_evaluation_that_makes_no_sense_is_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        EvaluationDone(**fields)  # type: ignore[arg-type]  # by name
