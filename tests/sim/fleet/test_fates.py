"""What becomes of a cohort, against a device that takes its steps one after the other, as the SDK does."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.sim.fleet.sure import require_drawn, require_share
from umbel.aggregation.secagg.turns import Phase
from umbel.client.wire.timing import Bandwidth
from umbel.sim.fleet.build import build_fleet
from umbel.sim.fleet.fates import (
    CohortAsk,
    DeviceStage,
    Fates,
    LineRates,
    Losses,
    RoundTimes,
    disturbed,
    reserve_s,
    undisturbed,
)
from umbel.sim.fleet.section import DropoutsSection, FleetSection, HoursSection, NetworkSection, SpeedSection

N = 20_000
DEVICES = np.arange(N)
seconds = st.floats(0.01, 1000.0)
n_bytes = st.integers(0, 10_000_000)


def ask_of(n: int, steps: int = 50, window_s: float = 600.0, secure: bool = False) -> CohortAsk:
    return CohortAsk(np.full(n, steps), 32, np.array([4_000_000]), np.array([1_000_000]), window_s, secure=secure)


def lines_of(down: float, up: float, latency_s: float = 0.0) -> LineRates:
    return LineRates(np.array([down]), np.array([up]), np.array([up]), np.array([latency_s]))


@example(model=1, update=8_399_908, more=9_410_868, down=7_655_725.0, up=1e6, latency_s=0.0, window_s=942.0)
@example(model=1, update=1, more=0, down=1e7, up=1e7, latency_s=0.0, window_s=942.0)
@given(n_bytes, n_bytes, n_bytes, st.floats(1e3, 1e7), st.floats(1e3, 1e7), st.floats(0, 2), st.floats(1, 4000))
def test_the_reserve_is_that_of_the_sdk(
    model: int, update: int, more: int, down: float, up: float, latency_s: float, window_s: float
) -> None:
    link = Bandwidth().after_download(model, model / down + latency_s).after_upload(update, update / up + latency_s)
    ask = CohortAsk(
        np.array([1]),
        1,
        np.array([model]),
        np.array([update]),
        window_s,
        update_bytes_max=update + more,
    )
    if not update:
        return  # the SDK never sends an update of no bytes
    assert reserve_s(ask, lines_of(down, up, latency_s))[0] == pytest.approx(
        link.reserve_s(update + more, window_s), rel=1e-12
    )


def trained_by_hand(
    fetched_s: float, step_s: float, steps: int, end_s: float, away: tuple[float, float] | None
) -> tuple[int, float]:
    """Steps done and when, as the ready trainer takes them; a step during which the device is lost is done again."""
    now, done = fetched_s, 0
    while True:
        if away is not None and now <= away[0] < now + step_s:
            now, away = away[1], None
        now += step_s
        done += 1
        if done >= steps or end_s - now <= 0 or end_s - now < step_s:
            return done, now


@given(
    seconds, st.integers(1, 60), st.floats(10, 500), st.integers(0, 40), st.floats(0.01, 0.99), seconds, st.booleans()
)
def test_steps_are_those_of_a_device_that_takes_one_after_the_other(
    step_s: float, steps: int, window_s: float, lost_in: int, part: float, away_s: float, is_lost: bool
) -> None:
    ask = CohortAsk(np.array([steps]), 1, np.array([1000]), np.array([2000]), window_s)
    lines = lines_of(1000.0, 1000.0)
    course, done = undisturbed(ask, lines, np.array([step_s]))
    lost_s = 1.0 + (min(lost_in, int(done[0]) - 1) + part) * step_s
    losses = Losses(np.array([lost_s]), np.array([away_s]), np.array([DeviceStage.TRAINING], np.int8))
    if not is_lost:
        losses = Losses(np.array([np.inf]), np.array([np.inf]), np.array([DeviceStage.NONE], np.int8))
    found, n_done = disturbed(ask, lines, np.array([step_s]), course, losses)
    if is_lost and lost_s + away_s >= window_s:
        assert (n_done[0], found.report_s[0], found.trained_s[0]) == (0, np.inf, np.inf)
        return
    end_s = window_s - float(reserve_s(ask, lines)[0])
    if is_lost:
        # Right at the end of a step both are right, and no clock is so exact.
        left = (end_s - lost_s - away_s) / step_s
        if abs(left - round(left)) < 1e-6:
            return
    elif abs((end_s - 1.0) / step_s - round((end_s - 1.0) / step_s)) < 1e-6:
        return
    expected, at = trained_by_hand(1.0, step_s, steps, end_s, (lost_s, lost_s + away_s) if is_lost else None)
    assert n_done[0] == expected
    assert found.trained_s[0] == pytest.approx(at)
    assert found.report_s[0] == pytest.approx(at + 2.0)


def fleet_fates(section: FleetSection, ask: CohortAsk, seed: int = 1, opened_at: float = 0.0) -> Fates:
    return build_fleet(section, seed, Path()).fates(DEVICES, 3, 1, opened_at, ask)


SLOW = SpeedSection(step_s=5.0)


def test_drop_outs_are_as_many_as_the_section_says_and_where() -> None:
    fates = fleet_fates(FleetSection(speed=SLOW, dropouts=DropoutsSection(per_round=0.3, training=2.0)), ask_of(N))
    require_share(fates.stage == DeviceStage.NONE, 0.7)
    for stage, weight in ((DeviceStage.DOWNLOAD, 1), (DeviceStage.TRAINING, 2), (DeviceStage.UPLOAD, 1)):
        require_share(fates.stage == stage, 0.3 * weight / 4)
    is_lost = np.isfinite(fates.lost_s)
    assert (is_lost == (fates.stage != DeviceStage.NONE)).all()
    assert np.isinf(fates.report_s[is_lost]).all()
    assert not fates.steps_done[is_lost].any()
    untroubled = fleet_fates(FleetSection(speed=SLOW), ask_of(N))
    in_download, in_training = fates.stage == DeviceStage.DOWNLOAD, fates.stage == DeviceStage.TRAINING
    assert np.isinf(fates.fetched_s[in_download]).all()
    require_drawn((fates.lost_s / untroubled.fetched_s)[in_download])
    begun_s, ended_s = untroubled.fetched_s, untroubled.trained_s
    require_drawn(((fates.lost_s - begun_s) / (ended_s - begun_s))[in_training])


def test_losses_at_work_have_a_constant_rate() -> None:
    rate = 6 / 3600
    dropouts = DropoutsSection(per_hour=6.0)
    fates = fleet_fates(FleetSection(speed=SLOW, dropouts=dropouts), ask_of(N))
    untroubled = fleet_fates(FleetSection(speed=SLOW), ask_of(N))
    is_lost = np.isfinite(fates.lost_s)
    until = untroubled.report_s[is_lost]
    require_drawn((1 - np.exp(-rate * fates.lost_s[is_lost])) / (1 - np.exp(-rate * until)))
    require_share(is_lost, float((1 - np.exp(-rate * untroubled.report_s)).mean()))
    by_hour = replace(dropouts, by_hour=(0.0,) * 12 + (1.0,) * 12)
    assert not np.isfinite(fleet_fates(FleetSection(speed=SLOW, dropouts=by_hour), ask_of(N)).lost_s).any()
    at_noon = fleet_fates(FleetSection(speed=SLOW, dropouts=by_hour), ask_of(N), opened_at=12.5 * 3600)
    assert (np.isfinite(at_noon.lost_s) == is_lost).all()


def test_in_secure_rounds_devices_fall_silent_in_every_phase_and_do_not_come_back() -> None:
    section = FleetSection(speed=SLOW, dropouts=DropoutsSection(per_round=0.5, training=1.0, returns=1.0))
    fates = fleet_fates(section, ask_of(N, secure=True))
    for stage in set(DeviceStage) - {DeviceStage.NONE}:
        require_share(fates.stage == stage, 0.5 / 7)
    assert np.isinf(fates.back_s).all()
    is_late = np.isin(fates.stage, [DeviceStage.NONE, DeviceStage.CONSISTENCY_CHECK, DeviceStage.UNMASKING])
    assert (np.isfinite(fates.report_s) == is_late).all()
    after = np.isin(fates.stage, [DeviceStage.CONSISTENCY_CHECK, DeviceStage.UNMASKING])
    assert (fates.lost_s[after] == fates.report_s[after]).all()
    assert not fates.lost_s[fates.stage == DeviceStage.ADVERTISE_KEYS].any()
    assert {DeviceStage(stage).silent_from for stage in fates.stage} == {None, *Phase}
    assert set(fleet_fates(section, ask_of(N)).stage) == {0, 1, 2, 3}


def test_who_comes_back_in_time_reports_late_or_in_part() -> None:
    section = FleetSection(speed=SLOW, dropouts=DropoutsSection(per_round=1.0, training=3.0, returns=0.6, away_s=100.0))
    fates, untroubled = fleet_fates(section, ask_of(N)), fleet_fates(FleetSection(speed=SLOW), ask_of(N))
    back = np.isfinite(fates.back_s)
    require_share(back, 0.6)
    require_share((fates.back_s[back] - fates.lost_s[back]) < 100.0, 0.5)
    reports = np.isfinite(fates.report_s)
    assert not reports[fates.back_s >= 600.0].any()
    assert reports[(fates.back_s < 600.0) & (fates.fetched_s < 600.0)].all()
    assert (fates.report_s[reports] >= fates.back_s[reports] - 1e-9).all()
    assert (fates.steps_done[reports] <= untroubled.steps_done[reports]).all()
    assert (fates.steps_done[reports] >= 1).all()
    later, fewer = fates.report_s > untroubled.report_s, fates.steps_done < untroubled.steps_done
    assert (later | fewer)[reports].mean() > 0.99
    assert (later & reports).sum() > N / 10
    assert (fewer & reports).sum() > N / 50


def test_devices_that_leave_are_lost_when_they_do() -> None:
    hours = HoursSection(by_hour=(1.0,) * 2 + (0.0,) + (1.0,) * 21)
    ask = ask_of(N, steps=100_000, window_s=7200.0)
    fates = fleet_fates(FleetSection(speed=SLOW, hours=hours), ask, opened_at=3600.0)
    is_present = build_fleet(FleetSection(hours=hours), 1, Path()).presence.is_present
    assert is_present(DEVICES, 3600.0).all()
    require_drawn(fates.lost_s / 3600)
    assert np.isinf(fates.report_s).all()
    for at in range(0, 500, 50):
        assert not is_present(DEVICES[at : at + 1], 3600.0 + fates.lost_s[at] + 1).any()


def test_a_model_that_comes_too_late_is_not_trained() -> None:
    section = FleetSection(network=NetworkSection(down_bytes_per_s=5000.0, spread=0.0, jitter=0.0))
    fates = fleet_fates(section, ask_of(N))
    assert np.isinf(fates.report_s).all()
    assert np.isinf(fates.trained_s).all()
    assert np.isinf(fates.lost_s).all()
    assert set(fates.spent().bytes_down) == {int((600 - 0.1) * 5000)}
    assert not fates.spent().bytes_up.any()


def test_bytes_count_until_a_device_is_lost_or_told_to_stop() -> None:
    dropouts = DropoutsSection(per_round=0.5, returns=0.5, training=1.0)
    section = FleetSection(speed=SLOW, network=NetworkSection(latency_s=0.0), dropouts=dropouts)
    fates = fleet_fates(section, ask_of(N))
    reports, gone = np.isfinite(fates.report_s), np.isinf(fates.back_s) & np.isfinite(fates.lost_s)
    assert (fates.spent().bytes_down[reports] == 4_000_000).all()
    assert (fates.spent().bytes_up[reports] == 1_000_000).all()
    in_download, in_training, in_upload = (
        gone & (fates.stage == stage) for stage in (DeviceStage.DOWNLOAD, DeviceStage.TRAINING, DeviceStage.UPLOAD)
    )
    require_drawn((fates.spent().bytes_down[in_download] + 0.5) / 4_000_001)
    assert (fates.spent().bytes_down[in_training | in_upload] == 4_000_000).all()
    assert not fates.spent().bytes_up[in_download | in_training].any()
    require_drawn((fates.spent().bytes_up[in_upload] + 0.5) / 1_000_001)


@given(st.integers(0, 1 << 40), st.lists(st.floats(0.0, 2000.0), min_size=2, max_size=5).map(sorted))
def test_what_was_spent_only_grows_and_ends_with_the_work(seed: int, moments: list[float]) -> None:
    section = FleetSection(speed=SLOW, dropouts=DropoutsSection(per_round=0.5, per_hour=3.0, returns=0.5))
    fates = build_fleet(section, seed, Path()).fates(np.arange(50), 1, 1, 0.0, ask_of(50))
    spent = [fates.spent(moment) for moment in moments]
    whole = fates.spent()
    for one, other in zip(spent, [*spent[1:], whole], strict=True):
        for name in ("bytes_down", "bytes_up", "busy_s"):
            assert (getattr(one, name) <= getattr(other, name) + 1e-6).all(), name
    reports, back = np.isfinite(fates.report_s), np.isfinite(fates.back_s)
    away_s = np.zeros(50)
    away_s[back] = fates.back_s[back] - fates.lost_s[back]
    assert np.allclose(whole.busy_s[reports], (fates.report_s - away_s)[reports])
    assert (fates.spent(0.0).busy_s == 0).all()


def test_a_course_says_what_a_device_is_about() -> None:
    one = np.array([1.0])
    course = RoundTimes(one * 0.1, one, one * 5, one * 7)
    for moment, stage in ((0.0, 1), (0.99, 1), (1.0, 2), (4.9, 2), (5.0, 3), (7.0, 0)):
        assert course.stage_at(np.array([moment])).tolist() == [stage]
