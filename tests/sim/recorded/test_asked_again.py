"""A fleet is asked again what was recorded: it answers as the one that left the record, or is seen to be another."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sim.fleet.rounds import MODEL_BYTES, UPDATE_BYTES, plan_of, play
from tests.sim.fleet.test_recorded import HONEST, SECTION, errors
from umbel.aggregation.run.sections import RoundsSection
from umbel.aggregation.run.trace import Trace, trace_of
from umbel.sim.fleet.build import build_fleet
from umbel.sim.fleet.fleet import Fleet
from umbel.sim.fleet.recorded import recorded_fleet
from umbel.sim.fleet.section import SpeedSection
from umbel.sim.recorded.asked_again import ATTEMPTS_MAX, NobodyComes, askable, asked_again, with_rounds

N = 150


def fleet_of(step_s: float) -> Fleet:
    return build_fleet(replace(SECTION, speed=SpeedSection(step_s=step_s, spread=0.6, jitter=0.2)), 3, Path())


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trace_of(play(fleet_of(3.0), N, 96, lambda number: plan_of(number, 1)))


def test_the_fleet_of_a_trace_gives_its_figures_again(trace: Trace) -> None:
    found = errors(trace, asked_again(trace, recorded_fleet(trace, 11, HONEST), 5))
    for what in ("committed", "clients asked", "reports in"):
        assert abs(found[what]) < 0.01, (what, found)
    for what in ("open, mean", "report after, median client", "bytes up", "bytes down"):
        assert abs(found[what]) < 0.1, (what, found)


def test_a_fleet_that_is_not_the_recorded_one_is_seen_to_be_another(trace: Trace) -> None:
    found = errors(trace, asked_again(trace, fleet_of(6.0), 5))
    assert found["report after, median client"] > 0.5


def test_each_attempt_is_asked_for_what_it_was_asked_for(trace: Trace) -> None:
    simulated = asked_again(trace, recorded_fleet(trace, 11, HONEST), 5)
    assert len(simulated.attempts) == len(trace.attempts)
    for recorded, again in zip(trace.attempts, simulated.attempts, strict=True):
        assert (again.window_s, again.over_selection) == (recorded.window_s, recorded.over_selection)
        assert (again.reports_wanted, again.reports_needed) == (20, 10)
        assert again.opened_at == recorded.opened_at
        assert {one.steps_planned for one in again.in_time} == {40}
        assert {one.bytes_up for one in again.in_time} == {UPDATE_BYTES}
        assert {one.bytes_down for one in again.in_time} == {MODEL_BYTES}


def test_what_a_draw_and_a_fleet_make_of_it_hangs_on_the_seed_alone(trace: Trace) -> None:
    def made(seed: int) -> Trace:
        return asked_again(trace, recorded_fleet(trace, 11, HONEST), seed)

    assert made(5) == made(5)
    assert made(5) != made(6)


def test_the_recorded_work_is_asked_for_in_other_rounds_as_the_other_fleet_would_answer(trace: Trace) -> None:
    """Beside what the fleet that left the trace makes of the very same question."""
    rounds = RoundsSection(count=1, target=10, minimum=5, over_selection=1.3, window_s=150.0)
    other = with_rounds(trace, rounds)
    assert {(one.window_s, one.reports_wanted, one.reports_needed) for one in other.attempts} == {(150.0, 10, 5)}
    found = errors(asked_again(other, fleet_of(3.0), 5), asked_again(other, recorded_fleet(trace, 11, HONEST), 5))
    for what in ("open, mean", "reports in", "clients asked", "bytes up", "bytes down"):
        assert abs(found[what]) < 0.1, (what, found)


def test_attempts_of_which_nobody_knows_when_they_were_to_close_are_not_asked_again(trace: Trace) -> None:
    def older(is_older: Callable[[int], bool]) -> Trace:
        attempts = [
            replace(one, reports_wanted=None, reports_needed=None) if is_older(i) else one
            for i, one in enumerate(trace.attempts)
        ]
        return replace(trace, attempts=tuple(attempts))

    assert askable(older(lambda _: True)) is None
    some = askable(older(lambda i: i < 90))
    assert some is not None
    assert some.attempts == trace.attempts[90:]
    assert askable(trace) == trace


def test_of_a_long_trace_attempts_are_taken_evenly(trace: Trace) -> None:
    long = askable(replace(trace, attempts=trace.attempts * 10))
    assert long is not None
    assert ATTEMPTS_MAX / 2 < len(long.attempts) <= ATTEMPTS_MAX
    assert long.attempts == (trace.attempts * 10)[::4]


def test_of_large_cohorts_fewer_attempts_are_enough(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert askable(trace) == trace
    monkeypatch.setattr("umbel.sim.recorded.asked_again.ASKED_MAX", 96 * 26 // 3)
    fewer = askable(trace)
    assert fewer is not None
    assert fewer.attempts == trace.attempts[::3]


def test_rounds_for_which_too_few_ever_come_are_told(trace: Trace) -> None:
    few = replace(trace, attempts=tuple(replace(one, reports_wanted=500, reports_needed=400) for one in trace.attempts))
    with pytest.raises(NobodyComes, match="never has enough devices present"):
        asked_again(replace(few, attempts=few.attempts[:2]), recorded_fleet(trace, 11, HONEST), 5)
