"""The window's bench on small fleets: real rounds in virtual time, alike luck for all, and a picture."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from umbel.aggregation.round.machine import advance
from umbel.aggregation.round.states import Gathered, Recruiting, Training
from umbel.aggregation.run.tuning import CONFIDENCE, foresee
from umbel.sim.bench.window.bench import (
    MINIMUM,
    TARGET,
    best_static,
    committed,
    goodput,
    hold_contest,
    limit,
    measure,
    minutes,
    pilot_window_s,
    run_file,
    true_curve,
)
from umbel.sim.bench.window.fleets import FLEETS, HOUR_S, device_index, device_name
from umbel.sim.bench.window.plot import draw
from umbel.sim.bench.window.rounds import EVERY_S, play

HOMOGENEOUS, HEAVY, DAY_NIGHT = FLEETS


def test_a_device_has_the_same_fate_whatever_is_asked_of_it() -> None:
    one, same, other = (HEAVY.round_of(1, 5, attempt, 0.0) for attempt in (1, 1, 2))
    assert np.array_equal(one.work_s, same.work_s)
    assert not np.array_equal(one.work_s, other.work_s)
    assert device_index(device_name(417)) == 417


def test_at_night_devices_are_quick_faithful_and_many() -> None:
    night, day = (DAY_NIGHT.habits(hour) for hour in (3.0, 15.0))
    assert night.median_s < day.median_s
    assert night.dropping < day.dropping
    assert night.waiting > day.waiting


def test_a_course_accounts_for_every_client_second() -> None:
    """With everybody reporting and all of it wanted, all client time is of use; a round lasts as its slowest client."""
    fleet = replace(HOMOGENEOUS, habits=lambda _hour: replace(HOMOGENEOUS.habits(0.0), dropping=0.0))
    file = run_file(4, 10_000.0, self_tuning=False, over_selection=1.0)
    course = play(fleet, lambda number, attempt, _known, _now: file.round_plan(number, attempt), 4, seed=1)
    assert course.goodput == 1.0
    assert [attempt.n_reported for attempt in course.attempts] == [TARGET] * 4
    assert course.rounds_s == pytest.approx(sum(attempt.open_s for attempt in course.attempts))
    first = fleet.round_of(1, 1, 1, EVERY_S)
    opened, _ = advance(Recruiting(file.round_plan(1, 1), EVERY_S), Gathered(EVERY_S, first.candidates()))
    assert isinstance(opened, Training)
    asked = [device_index(client) for client in opened.cohort]
    assert course.attempts[0].total_s == pytest.approx(first.work_s[asked].sum())


def test_failed_attempts_are_counted_and_tried_again() -> None:
    """Within this window some rounds get their minimum, and some do not."""
    file = run_file(6, 126.0, self_tuning=False)
    course = play(HOMOGENEOUS, lambda number, attempt, _known, _now: file.round_plan(number, attempt), 6, seed=1)
    failed = [attempt for attempt in course.attempts if not attempt.committed]
    assert failed
    assert course.n_committed == 6
    assert all(attempt.useful_s == 0 and attempt.n_reported < MINIMUM for attempt in failed)


@pytest.mark.slow
def test_the_best_static_choice_is_sure_enough_and_no_better_than_the_limit() -> None:
    plan = run_file(1, pilot_window_s(DAY_NIGHT), self_tuning=False).round_plan(1, 1)
    best = best_static(DAY_NIGHT, plan)
    forecasts = [foresee(plan, 0.0, true_curve(DAY_NIGHT, hour, plan.window_s), 1000) for hour in range(24)]
    row = int(np.argmin(np.abs(forecasts[0].n_asked - best.over_selection * TARGET)))
    column = int(np.argmin(np.abs(forecasts[0].window_s - best.window_s)))
    assert np.mean([one.p_commit[row, column] for one in forecasts]) >= CONFIDENCE
    use = sum(float(one.useful_s[row, column]) for one in forecasts) / sum(
        float(one.total_s[row, column]) for one in forecasts
    )
    assert use <= limit(DAY_NIGHT, plan)


@pytest.mark.slow
def test_the_self_tuned_window_wastes_less_and_commits_as_promised(tmp_path: Path) -> None:
    contest = hold_contest(HOMOGENEOUS, 30, (1,))
    assert goodput(contest.tuned) > 1.1 * goodput(contest.static)
    assert goodput(contest.tuned) < contest.limit
    assert committed(contest.tuned) >= CONFIDENCE
    assert minutes(contest.tuned) < HOUR_S
    assert max(attempt.window_s for attempt in contest.tuned[0].attempts) <= contest.window_s
    draw([contest], tmp_path / "new" / "window.png")
    picture = imread(tmp_path / "new" / "window.png")
    assert picture.shape[0] > 500
    assert picture.std() > 0.05, "something is drawn"


@pytest.mark.nightly
def test_the_bench_keeps_its_promises_on_every_fleet() -> None:
    report = measure(quick=True, plot=None)
    assert not report.broken, [(row.what, row.ours, row.hold) for row in report.broken]
    assert sum(row.promise is not None for row in report.rows) == 2 * len(FLEETS)
