"""When devices are there: shares by the hour, nights on the charger, recorded times; and when those that are leave."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.fleet.sure import require_share
from umbel.sim.fleet.presence import DAY_S, HOUR_S, Always, Charging, Hours, Presence, Recorded, Zones
from umbel.sim.fleet.section import HoursSection

N = 20_000
DEVICES = np.arange(N)
HERE = Zones(5)
NIGHTS = Hours(5, HERE, np.array(HoursSection().shares), 0.5, np.ones(1))
CHARGERS = Charging(5, HERE, 22.5, 7.0, 1.5)
TIMES = Recorded(
    3, 1000.0, np.array([0, 0, 1, 2]), np.array([0.0, 900.0, 100.0, 0.0]), np.array([50.0, 1000.0, 200.0, 1000.0])
)


@pytest.mark.parametrize("habit", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("hour", [0.0, 3.0, 9.5, 15.0, 21.25, 24 * 40 + 3])
def test_by_the_hour_the_share_of_the_section_is_there(hour: float, habit: float) -> None:
    there = replace(NIGHTS, habit=habit).is_present(DEVICES, hour * HOUR_S)
    require_share(there, float(np.interp(hour, np.arange(24), NIGHTS.shares, period=24)))


def test_habits_make_the_same_devices_come_back() -> None:
    night = 30 * DAY_S

    def again(habit: float) -> float:
        hours = Hours(5, HERE, np.full(24, 0.5), habit, np.ones(1))
        return float(np.mean(hours.is_present(DEVICES, night) == hours.is_present(DEVICES, night + DAY_S)))

    assert again(1.0) == 1.0
    assert abs(again(0.0) - 0.5) < 0.025
    assert abs(again(0.5) - 0.625) < 0.025  # both days are usual ones with a chance of a quarter


def test_devices_live_in_their_zones() -> None:
    away = replace(NIGHTS, zones=Zones(5, (0.0, 12.0)), habit=0.0)
    there = away.is_present(DEVICES, 3 * HOUR_S)
    is_here = Zones(5, (0.0, 12.0)).local_s(DEVICES, 0.0) == 0
    require_share(is_here, 0.5)
    require_share(there[is_here], 0.9)
    require_share(there[~is_here], 0.2)


def test_a_factor_makes_a_device_rarer() -> None:
    hours = Hours(5, HERE, np.full(24, 0.5), 0.0, np.array([1.0, 0.2]))
    there = hours.is_present(DEVICES, 0.0)
    require_share(there[::2], 0.5)
    require_share(there[1::2], 0.1)


def test_charging_is_for_so_many_hours_about_that_hour() -> None:
    hours = np.arange(0, 24, 0.25) + 24 * 9
    there = np.array([CHARGERS.is_present(DEVICES, hour * HOUR_S) for hour in hours])
    assert there.mean() * 24 == pytest.approx(7.0, abs=0.1)
    assert there[:, 0].any()
    assert 2 < hours[there.mean(axis=1).argmax()] - 24 * 9 < 3 or there.mean(axis=1).max() > 0.9
    assert there[np.abs(hours - 24 * 9 - 14) < 1].mean() < 0.01


@pytest.mark.parametrize("plugged_at", [0.0, 6.0, 11.9, 12.0, 23.9, 24.0])
def test_charging_may_begin_at_any_hour(plugged_at: float) -> None:
    chargers = Charging(5, HERE, plugged_at, 5.0, 0.0)
    for hour, is_present in ((-0.1, False), (0.1, True), (4.9, True), (5.1, False)):
        assert chargers.is_present(DEVICES, (24 * 3 + plugged_at + hour) * HOUR_S).all() == is_present, hour


@pytest.mark.parametrize("presence", [NIGHTS, replace(NIGHTS, zones=Zones(5, (0.0, 5.5))), CHARGERS])
@given(st.floats(0, 10 * DAY_S))
def test_devices_stay_until_they_leave(presence: Presence, now: float) -> None:
    devices = np.arange(200)
    there = devices[presence.is_present(devices, now)]
    leaves_s = presence.leaves_s(there, now, DAY_S)
    for at, device in enumerate(there[:20]):
        leaves = float(leaves_s[at])
        one = np.array([device])
        for moment in np.linspace(0, min(leaves, DAY_S), 7)[:-1]:
            assert presence.is_present(one, now + moment).all()
        if leaves < DAY_S:
            assert not presence.is_present(one, now + leaves + 0.01).any()


def test_who_leaves_beyond_the_horizon_is_not_said_to_leave() -> None:
    for presence in (NIGHTS, CHARGERS, TIMES):
        there = np.arange(3)[presence.is_present(np.arange(3), 0.0)]
        leaves_s = presence.leaves_s(there, 0.0, 30.0)
        assert (np.isinf(leaves_s) | (leaves_s < 30.0)).all()


def test_recorded_times_begin_anew_and_so_do_devices() -> None:
    moments = {0.0: [1, 0, 1], 49.9: [1, 0, 1], 50.0: [0, 0, 1], 150.0: [0, 1, 1], 950.0: [1, 0, 1], 1000.0: [1, 0, 1]}
    for now, expected in moments.items():
        for cycle in (0, 7):
            found = TIMES.is_present(np.array([0, 1, 2, 3, 4, 5]), now + 1000 * cycle)
            assert found.astype(int).tolist() == expected * 2, now


def test_who_is_there_across_the_end_of_the_cycle_stays() -> None:
    devices = np.array([0, 2])
    assert TIMES.leaves_s(devices, 950.0, 1e9).tolist() == [100.0, np.inf]
    assert TIMES.leaves_s(np.array([0]), 20.0, 1e9).tolist() == [30.0]
    assert TIMES.leaves_s(np.array([1]), 150.0, 1e9).tolist() == [50.0]


def test_without_a_rule_devices_are_always_there() -> None:
    assert Always().is_present(DEVICES, 1e9).all()
    assert np.isinf(Always().leaves_s(DEVICES, 1e9, 1e9)).all()
