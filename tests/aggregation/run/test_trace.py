"""The trace of a run: what its records tell of its clients' times, without a name."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.canonical import canonical
from umbel.aggregation.plans.round import Task
from umbel.aggregation.run.records import Absent, AbsentClient, ClientRecord, Fate, RoundRecord
from umbel.aggregation.run.trace import FORMAT, Trace, TracedAttempt, TracedClient, trace_of

DONE = ClientRecord(
    "north",
    Fate.ACCEPTED,
    "the report counts",
    100,
    steps_done=7,
    steps_planned=7,
    bytes_up=50,
    bytes_down=90,
    report_s=12.5,
    silent_s=0.5,
    tier="hospital",
    train_s=10.0,
    upload_bytes_per_s=25.0,
)
LOST = ClientRecord("south", Fate.LOST, "silent", 80, bytes_down=90, silent_s=40.0)
RECORD = RoundRecord(
    run="ward",
    round=3,
    attempt=2,
    committed=True,
    reason="the target is in",
    model_version=3,
    model_sha256="a" * 64,
    opened_at=1_750_000_000.5,
    wall_s=13.0,
    selected=2,
    reported=1,
    partial=0,
    dropped=1,
    sample_count=100,
    bytes_up=50,
    bytes_down=180,
    metrics={"loss": 0.5},
    clients=(DONE, LOST),
    passed_over=4,
    open_s=12.5,
    window_s=600.0,
    over_selection=1.3,
    model_bytes=90,
    absent=Absent(5, 500, (AbsentClient("east", 100, 1e9), AbsentClient("south", 1, 1e9))),
)


def test_a_trace_has_the_times_of_a_record_and_numbers_for_its_clients() -> None:
    assert trace_of([RECORD]) == Trace(
        format=FORMAT,
        clients=3,
        attempts=(
            TracedAttempt(
                round=3,
                attempt=2,
                committed=True,
                opened_at=1_750_000_000.5,
                open_s=12.5,
                window_s=600.0,
                over_selection=1.3,
                model_bytes=90,
                bytes_up=50,
                bytes_down=180,
                waiting=6,
                absent=5,
                absent_clients=(2, 1),
                secure=False,
                clients=(
                    TracedClient(0, Fate.ACCEPTED, 12.5, 0.5, 100, 7, 7, 50, 90, 10.0, 25.0),
                    TracedClient(1, Fate.LOST, None, 40.0, 80, 0, 0, 0, 90, None, None),
                ),
            ),
        ),
    )


def test_a_client_has_the_same_number_in_all_attempts() -> None:
    later = replace(RECORD, round=4, clients=(LOST, replace(DONE, client="west"), DONE), selected=3, absent=None)
    found = trace_of([RECORD, later]).attempts[1]
    assert [one.client for one in found.clients] == [1, 3, 0]
    assert (found.absent, found.absent_clients) == (None, ())


def test_how_many_reports_were_wanted_is_known_unless_the_record_is_older_than_that() -> None:
    (known,) = trace_of([replace(RECORD, target=20, minimum=10)]).attempts
    assert (known.reports_wanted, known.reports_needed) == (20, 10)
    (older,) = trace_of([RECORD]).attempts
    assert (older.reports_wanted, older.reports_needed) == (None, None)
    for wanted, least in ((20, None), (None, 10), (0, 0), (10, 20)):
        with pytest.raises(ValueError, match="reports_"):
            replace(older, reports_wanted=wanted, reports_needed=least)


def test_a_trace_names_nobody_and_nothing() -> None:
    text = canonical(trace_of([RECORD]))
    for word in ("north", "south", "east", "ward", "hospital", "loss", "a" * 64, 'silent"', "target"):
        assert word not in text


@pytest.mark.parametrize(
    "record", [replace(RECORD, task=Task.EVALUATION), replace(RECORD, away_s=1.0), replace(RECORD, clients=())]
)
def test_what_shows_no_times_is_left_out(record: RoundRecord) -> None:
    assert trace_of([record, RECORD]) == trace_of([RECORD])
    with pytest.raises(ValueError, match="nothing to trace"):
        trace_of([record])


@given(st.integers(0, 1 << 62), st.floats(0, 1.7e308))
def test_whatever_a_client_says_of_its_work_there_is_a_trace(steps: int, train_s: float) -> None:
    client = replace(DONE, steps_done=steps, steps_planned=1 << 62, train_s=train_s)
    assert canonical(trace_of([replace(RECORD, clients=(client, LOST))]))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": 2}, "format 2, but this version of umbel reads format 1"),
        ({"clients": 1}, "client 2, but the trace has 1"),
        ({"attempts": ()}, "number of attempts"),
    ],
)
def test_a_trace_that_cannot_be_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replace(trace_of([RECORD]), **change)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"opened_at": float("nan")}, "opened_at"),
        ({"open_s": -1.0}, "open_s"),
        ({"over_selection": 0.0, "reports_wanted": 2, "reports_needed": 1}, "over_selection"),
        ({"waiting": 1}, "waiting"),
        ({"absent": 1}, "absent must lie between 2"),
        ({"absent": None}, "must also have `absent`"),
        ({"bytes_up": 1 << 60}, "bytes_up"),
    ],
)
def test_an_attempt_that_cannot_be_is_refused(change: dict[str, Any], why: str) -> None:
    (attempt,) = trace_of([RECORD]).attempts
    with pytest.raises(ValueError, match=why):
        replace(attempt, **change)
    with pytest.raises(ValueError, match="lists a client twice"):
        replace(attempt, clients=(attempt.clients[0],) * 2)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"steps_done": 8}, "steps_done must lie between 0 and 7"),
        ({"report_s": float("inf")}, "report_s"),
        ({"upload_bytes_per_s": 0.0}, "upload_bytes_per_s"),
        ({"client": -1}, "client"),
    ],
)
def test_a_client_that_cannot_be_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replace(trace_of([RECORD]).attempts[0].clients[0], **change)
