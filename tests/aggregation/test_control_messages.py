"""Messages, records and run files as they cross HTTP and disk: through pydantic, at the rim, with our checks."""

import base64
import math
import tomllib
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.messages import (
    AssignmentCounts,
    AssignmentState,
    AssignmentStatus,
    CheckedIn,
    CheckIn,
    Decline,
    Enrolled,
    Enrolment,
    Outcome,
    Problem,
    ReportAnswer,
    RunStatus,
)
from umbel.aggregation.plans.assignment import Assignment, ModelRef
from umbel.aggregation.plans.codec import CodecPlan, Grid
from umbel.aggregation.plans.round import Weighting
from umbel.aggregation.plans.training import TrainingPlan, TrainingSection
from umbel.aggregation.reports import EvaluationDone, WorkDone
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.records import ClientRecord, Fate, LiveRound, RoundRecord, RunProgress, RunView
from umbel.aggregation.types import AssignmentId, RunId

KEY = "JrQLj5P/89iXES9+vFgrIy29clF9CC/oPPsw3c5D0bs="  # test-key-ed25519 of RFC 9421, B.1.4
MODEL = ModelRef(3, "a" * 64, 1000, "b" * 64)
ASSIGNMENT = Assignment(
    id=AssignmentId("demo.4.1.ward-7"),
    run=RunId("demo"),
    round=4,
    attempt=1,
    model=MODEL,
    training=TrainingPlan(local_steps=5),
    codec=CodecPlan(),
    grid=Grid.finest(max_abs=64.0, total_weight_max=300 << 20),
    sample_count_max=1 << 20,
    seed=5,
    window_s=60.0,
)
CLIENT = ClientRecord("ward-7", Fate.PARTIAL, "the report counts", 10, 3, 5, 100, 200, 1.5)
ROUND = RoundRecord(
    "demo",
    4,
    1,
    True,
    "the target is in",
    4,
    "c" * 64,
    0.0,
    1.0,
    3,
    2,
    1,
    1,
    20,
    100,
    200,
    {},
    {"accuracy": 0.5},
    (CLIENT,),
)
LIVE = LiveRound(5, 1, "recruiting", "1 of 3 clients waits", 1, 2, None)
VIEW = RunView("demo", RunStatus.RUNNING, "under way", 4, 20, 0.0, MODEL)

RUN_FILE = """
name = "ward-triage"
seed = 7
[rounds]
count = 20
target = 8
minimum = 4
weighting = "proportional"
[training]
local_steps = 10
[aggregation]
max_abs = 8.0
"""


@pytest.mark.parametrize(
    "message",
    [
        Enrolment("token", "ward-7", KEY, {"tier": "hospital"}),
        Enrolled("ward-7", 1.0),
        CheckIn(RunId("demo"), 10, "b" * 64),
        CheckedIn(RunStatus.RUNNING, "here is work", 0.0, ASSIGNMENT),
        CheckedIn(RunStatus.FINISHED, "done", 60.0),
        AssignmentStatus(AssignmentState.OPEN, "the window is open", 5.0),
        AssignmentCounts(counts=True),
        WorkDone(10, 3, 5, "0" * 64, 1.5, {"loss": 0.25}, {"accuracy": 0.5}, 4),
        WorkDone(10, 3, 5, "0" * 64, counts={"n": (1, 2)}, evaluation_counts={"n": (3,)}, evaluation_sample_count=4),
        EvaluationDone(10, {"loss": 0.25}, evaluation_counts={"confusion": (1, 2, 3, 4)}),
        ReportAnswer(Outcome.LATE, "the window is over"),
        Decline("low battery"),
        Problem("urn:umbel:problem:late", "Late", 409, "Check in again."),
        RunProgress(VIEW, (ROUND,), 4, LIVE),
    ],
    ids=lambda message: type(message).__name__,
)
def test_every_message_survives_json(message: object) -> None:
    adapter: TypeAdapter[object] = TypeAdapter(type(message))
    assert adapter.validate_json(adapter.dump_json(message)) == message


def test_a_message_from_a_newer_peer_may_carry_more() -> None:
    decline = TypeAdapter(Decline).validate_python({"reason": "busy", "since": "a later version"})
    assert decline == Decline("busy")


@pytest.mark.parametrize(
    "change",
    [
        {"client": "Ward 7"},
        {"token": ""},
        {"token": "x" * 257},
        {"public_key": "not base64"},
        {"public_key": "ключ"},
        {"public_key": base64.b64encode(bytes(31)).decode()},
        {"labels": {"Tier": "x"}},
        {"labels": {"tier": "not a slug"}},
        {"labels": {f"l{i}": "x" for i in range(17)}},
    ],
)
def test_an_enrolment_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Enrolment).validate_python({"token": "t", "client": "ward-7", "public_key": KEY, **change})


def test_an_enrolment_never_shows_its_token() -> None:
    assert "hunter2" not in repr(Enrolment("hunter2", "ward-7", KEY))


@pytest.mark.parametrize(
    "change",
    [
        {"run": "no run"},
        {"sample_count": -1},
        {"sample_count": (1 << 40) + 1},
        {"layout_digest": "b" * 63},
        {"wait_s": -1},
        {"wait_s": 31},
        {"wait_s": math.nan},
    ],
)
def test_a_check_in_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(CheckIn).validate_python({"run": "demo", "sample_count": 1, "layout_digest": "b" * 64, **change})


@pytest.mark.parametrize("reason", ["", "x" * 1001])
def test_a_decline_gives_a_reason(reason: str) -> None:
    with pytest.raises(ValueError, match="reason must have"):
        Decline(reason)


def test_a_client_refuses_an_assignment_whose_grid_could_overflow() -> None:
    adapter = TypeAdapter(Assignment)
    text = adapter.dump_python(ASSIGNMENT, mode="json")
    text["grid"]["step"] /= 2
    with pytest.raises(ValidationError, match="could overflow"):
        adapter.validate_python(text)


# --- run files --------------------------------------------------------------------------------------------------------


def parse(text: str) -> RunFile:
    return TypeAdapter(RunFile).validate_python(tomllib.loads(text))


def test_a_run_file_fills_in_the_rest() -> None:
    run = parse(RUN_FILE)
    plan = run.round_plan(3, 2)
    assert (plan.run, plan.number, plan.attempt, plan.target, plan.minimum) == ("ward-triage", 3, 2, 8, 4)
    assert (plan.weighting, plan.max_abs, plan.seed, plan.n_wanted) == (Weighting.PROPORTIONAL, 8.0, 7, 11)
    assert run.training.local_steps == 10


def test_the_shortest_run_file() -> None:
    run = parse('name = "demo"\nrounds = { count = 1, target = 1 }')
    assert run.training == TrainingSection(local_epochs=1)
    assert run.round_plan(1, 1).minimum == 1


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("seed = 7", "sede = 7", "sede"),
        ("count = 20", "count = 20\ncuont = 1", "cuont"),
        ("local_steps = 10", "local_steps = 10\nlr = 0.1", "lr"),
        ("max_abs = 8.0", "max_abs = 8.0\nserver_lr = 1.0", "server_lr"),
        ("seed = 7", "seed = -1", "seed must lie"),
        ("seed = 7", f"seed = {1 << 63}", "seed must lie"),
        ('name = "ward-triage"', 'name = "Ward"', "name must be"),
        ('name = "ward-triage"', "", "name"),
        ("count = 20", "count = 0", "count must lie"),
        ("count = 20", "count = 1_000_001", "count must lie"),
        ("minimum = 4", "minimum = 9", "minimum must lie"),
        ("target = 8", "target = 2_000_000", "target must lie"),
        ('"proportional"', '"median"', "weighting"),
        ("local_steps = 10", "local_steps = 10\nlocal_epochs = 1", "not both"),
        ("max_abs = 8.0", "max_abs = inf", "max_abs must lie"),
        ("max_abs = 8.0", "max_abs = nan", "max_abs must lie"),
        ("max_abs = 8.0", "server_learning_rate = 0.0", "server_learning_rate must"),
        ("max_abs = 8.0", "sample_count_max = 0", "sample_count_max must lie"),
    ],
)
def test_a_run_file_no_round_could_be_planned_from_is_refused_in_words(old: str, new: str, words: str) -> None:
    assert old in RUN_FILE
    with pytest.raises(ValidationError, match=words):
        parse(RUN_FILE.replace(old, new))


def test_sample_counts_too_large_to_sum_exactly_are_refused() -> None:
    text = RUN_FILE.replace('"proportional"', '"samples"').replace("max_abs = 8.0", f"sample_count_max = {1 << 40}")
    with pytest.raises(ValidationError, match="lower sample_count_max or the number of clients asked"):
        parse(text)
