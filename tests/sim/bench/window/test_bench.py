"""The window's bench on small fleets: real rounds in virtual time, alike luck for all, and a picture."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from umbel.aggregation.run.tuning import CONFIDENCE, foresee
from umbel.sim.bench.window import (
    EVERY_S,
    FLEETS,
    HOUR_S,
    MINIMUM,
    TARGET,
    best_static,
    committed,
    draw_windows,
    goodput,
    hold_contest,
    limit,
    measure,
    minutes,
    pilot_window_s,
    reports,
    run_file,
    run_rounds,
    true_curve,
)
from umbel.sim.fleet.fates import CohortAsk
from umbel.sim.fleet.section import DropoutsSection

HOMOGENEOUS, HEAVY, DAY_NIGHT = FLEETS
ASK = CohortAsk(np.ones(1000, np.int64), 1, np.zeros(1, np.int64), np.zeros(1, np.int64), 1e6)


def test_a_device_has_the_same_fate_whatever_is_asked_of_it() -> None:
    devices, everybody = HEAVY.devices(1), np.arange(1000)
    one, same, other = (devices.fates(everybody, 5, attempt, 0.0, ASK) for attempt in (1, 1, 2))
    assert np.array_equal(one.report_s, same.report_s)
    assert not np.array_equal(one.report_s, other.report_s)


def test_at_night_devices_are_quick_faithful_and_many() -> None:
    night, day = (DAY_NIGHT.devices(1).fates_at(hour, 1e6) for hour in (3, 15))
    assert len(night.devices) > 2 * len(day.devices)
    assert np.median(night.step_s) < 0.5 * np.median(day.step_s)
    assert np.isinf(night.report_s).mean() < 0.1 < np.isinf(day.report_s).mean()


def test_a_run_accounts_for_every_client_second() -> None:
    """With everybody reporting and all of it wanted, all client time is of use; a round lasts as its slowest client."""
    faithful = replace(HOMOGENEOUS, section=replace(HOMOGENEOUS.section, dropouts=DropoutsSection()))
    run = run_rounds(faithful.devices(1), run_file(4, 10_000.0, self_tuning=False, over_selection=1.0))
    assert goodput([run]) == 1.0
    assert [attempt.reported for attempt in run.attempts] == [TARGET] * 4
    assert reports([run]) == TARGET
    assert [attempt.now_s - attempt.virtual_s for attempt in run.attempts] == [EVERY_S * i for i in (1, 2, 3, 4)]
    assert run.rounds_s == pytest.approx(sum(attempt.virtual_s for attempt in run.attempts))
    everybody_s = faithful.devices(1).fates(np.arange(1000), 1, 1, EVERY_S, ASK).step_s
    assert everybody_s.min() * TARGET < run.attempts[0].busy_s < run.attempts[0].virtual_s * TARGET


def test_failed_attempts_are_counted_and_tried_again() -> None:
    """Within this window some rounds get their minimum, and some do not."""
    run = run_rounds(HOMOGENEOUS.devices(1), run_file(6, 128.0, self_tuning=False))
    failed = [attempt for attempt in run.attempts if not attempt.committed]
    assert failed
    assert run.n_committed == 6
    assert all(attempt.wasted_s == attempt.busy_s and attempt.reported < MINIMUM for attempt in failed)


@pytest.mark.nightly
def test_the_best_static_choice_is_sure_enough_and_no_better_than_the_limit() -> None:
    plan = run_file(1, pilot_window_s(DAY_NIGHT), self_tuning=False).round_plan(1, 1)
    best = best_static(DAY_NIGHT, plan)
    forecasts = [foresee(plan, 0.0, true_curve(DAY_NIGHT, hour, plan.window_s), 1000) for hour in range(24)]
    row = int(np.argmin(np.abs(forecasts[0].n_asked - best.over_selection * TARGET)))
    column = int(np.flatnonzero(forecasts[0].window_s == best.window_s)[-1])  # several where the window is the longest
    assert np.mean([one.p_commit[row, column] for one in forecasts]) >= CONFIDENCE
    use = sum(float(one.useful_s[row, column]) for one in forecasts) / sum(
        float(one.total_s[row, column]) for one in forecasts
    )
    assert use <= limit(DAY_NIGHT, plan)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_self_tuned_window_wastes_less_and_commits_as_promised(tmp_path: Path) -> None:
    contest = hold_contest(HOMOGENEOUS, 30, (1,))
    assert goodput(contest.tuned) > 1.1 * goodput(contest.static)
    assert goodput(contest.tuned) < contest.limit
    assert committed(contest.tuned) >= CONFIDENCE
    assert minutes(contest.tuned) < HOUR_S
    assert max(attempt.window_s for attempt in contest.tuned[0].attempts) <= contest.window_s
    draw_windows([contest], tmp_path / "new" / "window.png")
    picture = imread(tmp_path / "new" / "window.png")
    assert picture.shape[0] > 500
    assert picture.std() > 0.05, "something is drawn"


@pytest.mark.nightly
def test_the_bench_keeps_its_promises_on_every_fleet() -> None:
    report = measure(quick=True, plot=None)
    assert not report.broken, [(row.what, row.ours, row.hold) for row in report.broken]
    assert sum(row.promise is not None for row in report.rows) == 2 * len(FLEETS)
