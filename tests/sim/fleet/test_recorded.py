"""A fleet made of a trace behaves as the one that left it, also where rounds are run in another way."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.sim.fleet.rounds import MODEL_BYTES, UPDATE_BYTES, plan_of, play
from umbel.aggregation.canonical import canonical
from umbel.aggregation.run.records import RoundRecord
from umbel.aggregation.run.trace import Trace, trace_of
from umbel.aggregation.types import ClientId, client_number
from umbel.sim.fleet.build import build_fleet
from umbel.sim.fleet.draws import Trait
from umbel.sim.fleet.faults import Faults
from umbel.sim.fleet.fleet import Fleet
from umbel.sim.fleet.presence import Always, Hours
from umbel.sim.fleet.recorded import recorded_fleet
from umbel.sim.fleet.section import (
    CorruptSection,
    DropoutsSection,
    FleetSection,
    HoursSection,
    MaliciousSection,
    NetworkSection,
    SpeedSection,
)
from umbel.sim.recorded.asked_again import compare

N = 150
HONEST = Faults(0, CorruptSection(0.0), MaliciousSection(0.0))
SECTION = FleetSection(
    speed=SpeedSection(step_s=3.0, spread=0.6, jitter=0.2),
    network=NetworkSection(down_bytes_per_s=4e5, up_bytes_per_s=5e4, spread=0.4, jitter=0.1),
    hours=HoursSection(night=0.9, day=0.4, habit=0.0),
    dropouts=DropoutsSection(per_hour=1.5),
)


@pytest.fixture(scope="module")
def original() -> Fleet:
    return build_fleet(SECTION, 3, Path())


@pytest.fixture(scope="module")
def records(original: Fleet) -> list[RoundRecord]:
    return play(original, N, 192, lambda number: plan_of(number, 1))


@pytest.fixture(scope="module")
def trace(records: list[RoundRecord]) -> Trace:
    return trace_of(records)


def errors(recorded: Trace, simulated: Trace) -> dict[str, float]:
    return {row.what: row.relative for row in compare(recorded, [simulated]) if row.relative is not None}


def test_the_same_rounds_with_other_luck_come_out_alike(trace: Trace) -> None:
    simulated = trace_of(play(recorded_fleet(trace, 11, HONEST), N, 192, lambda number: plan_of(number, 1)))
    found = errors(trace, simulated)
    for what in ("open, mean", "open, median", "reports in", "clients asked", "bytes up", "bytes down", "committed"):
        assert abs(found[what]) < 0.08, (what, found)
    for what in ("lost or declined", "drop-outs: asked and not in", "report after, median client"):
        assert abs(found[what]) < 0.2, (what, found)


@pytest.mark.parametrize(("target", "window_s", "update_bytes"), [(10, 600.0, 4_000_000), (24, 150.0, 1_000_000)])
def test_another_window_target_and_codec_come_out_as_they_would_have(
    original: Fleet, trace: Trace, target: int, window_s: float, update_bytes: int
) -> None:
    """The question that a trace is for, and the answer of the fleet that left it."""
    truth, simulated = (
        trace_of(play(fleet, N, 96, lambda number: plan_of(number, 1, target=target, window_s=window_s), update_bytes))
        for fleet in (original, recorded_fleet(trace, 11, HONEST))
    )
    found = errors(truth, simulated)
    for what in ("open, mean", "reports in", "clients asked", "bytes up", "bytes down"):
        assert abs(found[what]) < 0.1, (what, found)
    before = errors(trace, truth)
    assert abs(before["open, mean"]) > 0.3, "or the question was no question"


def test_clients_that_are_slow_or_well_connected_stay_so(original: Fleet, records: list[RoundRecord]) -> None:
    trace = trace_of(records)
    names = dict.fromkeys(name for record in records for name in named(record))  # in the order of their numbers
    devices = np.array([client_number(ClientId(name)) for name in names])
    fleet, numbers = recorded_fleet(trace, 11, HONEST), np.arange(trace.clients)
    traits: list[Callable[[Fleet], Trait]] = [lambda f: f.speed.trait, lambda f: f.network.up, lambda f: f.network.down]
    for of in traits:
        known, made = np.log(of(original).usual(devices)), np.log(of(fleet).usual(numbers))
        assert np.corrcoef(known, made)[0, 1] > 0.85
        assert abs(known.mean() - made.mean()) < 0.1
        assert abs(known.std() / made.std() - 1) < 0.2


def named(record: RoundRecord) -> list[str]:
    assert record.absent is not None
    return [*(one.client for one in record.clients), *(one.client for one in record.absent.named)]


def test_who_was_at_work_when_rounds_closed_is_not_taken_for_quick(original: Fleet) -> None:
    """Rounds close at the quickest four of ten; the others are known only to be slower."""
    trace = trace_of(play(original, N, 192, lambda number: replace(plan_of(number, 1, target=10), over_selection=2.5)))
    fleet = recorded_fleet(trace, 11, HONEST)
    true, made = (np.log(one.speed.trait.usual(np.arange(N))) for one in (original, fleet))
    seen = [c.train_s / c.steps_done for a in trace.attempts for c in a.clients if c.train_s and c.steps_done]
    assert abs(made.mean() - true.mean()) < 0.15
    assert abs(made.std() / true.std() - 1) < 0.25
    assert true.mean() - np.log(seen).mean() > 0.4, "or there was nothing to mend"


def test_presence_follows_the_hours_of_the_trace(trace: Trace) -> None:
    presence = recorded_fleet(trace, 11, HONEST).presence
    assert isinstance(presence, Hours)
    assert np.abs(presence.shares - np.array(HoursSection(night=0.9, day=0.4).shares)).max() < 0.1


def test_without_a_word_of_the_absent_devices_are_always_there(trace: Trace) -> None:
    silent = replace(trace, attempts=tuple(replace(one, absent=None, absent_clients=()) for one in trace.attempts))
    assert isinstance(recorded_fleet(silent, 11, HONEST).presence, Always)


def test_a_secure_run_shows_how_long_work_takes_in_all(trace: Trace) -> None:
    attempts = tuple(
        replace(
            attempt,
            secure=True,
            clients=tuple(
                replace(one, train_s=None, upload_bytes_per_s=None, steps_done=0, steps_planned=0)
                for one in attempt.clients
            ),
        )
        for attempt in trace.attempts
    )
    fleet = recorded_fleet(replace(trace, attempts=attempts), 11, HONEST)
    simulated = trace_of(play(fleet, N, 192, lambda number: plan_of(number, 1)))
    found = errors(trace, simulated)
    for what in ("open, mean", "reports in", "clients asked"):
        assert abs(found[what]) < 0.08, (what, found)


def test_where_uploads_were_not_measured_lines_are_taken_for_alike_both_ways(original: Fleet, trace: Trace) -> None:
    attempts = tuple(
        replace(attempt, clients=tuple(replace(one, upload_bytes_per_s=None) for one in attempt.clients))
        for attempt in trace.attempts
    )
    fleet = recorded_fleet(replace(trace, attempts=attempts), 11, HONEST)
    devices = np.arange(N)
    bytes_s = [
        np.mean(MODEL_BYTES / one.network.down.usual(devices) + UPDATE_BYTES / one.network.up.usual(devices))
        for one in (original, fleet)
    ]
    assert bytes_s[1] == pytest.approx(bytes_s[0], rel=0.1)
    found = errors(trace, trace_of(play(fleet, N, 96, lambda number: plan_of(number, 1))))
    for what in ("open, mean", "reports in", "bytes up", "bytes down"):
        assert abs(found[what]) < 0.08, (what, found)


def test_a_trace_in_which_nobody_reports_is_refused(trace: Trace) -> None:
    silent = tuple(
        replace(attempt, clients=tuple(replace(one, report_s=None, train_s=None) for one in attempt.clients))
        for attempt in trace.attempts
    )
    with pytest.raises(ValueError, match="no client has reported"):
        recorded_fleet(replace(trace, attempts=silent), 1, HONEST)


def test_a_section_names_a_trace(tmp_path: Path, trace: Trace) -> None:
    (tmp_path / "trace.json").write_text(canonical(trace))
    fleet = build_fleet(FleetSection(recorded="trace.json"), 5, tmp_path)
    usual = fleet.speed.trait.usual(np.arange(10))
    assert usual.tobytes() == recorded_fleet(trace, fleet.seed, HONEST).speed.trait.usual(np.arange(10)).tobytes()


def test_what_a_section_says_beside_its_trace_holds(tmp_path: Path, trace: Trace) -> None:
    (tmp_path / "trace.json").write_text(canonical(trace))
    for partial_work in (True, False):
        section = FleetSection(recorded="trace.json", partial_work=partial_work)
        assert build_fleet(section, 5, tmp_path).partial_work is partial_work
