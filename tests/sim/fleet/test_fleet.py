"""A fleet says the same of a device whoever else is asked, and costs nothing until somebody is."""

import tracemalloc
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.fleet.sure import require_drawn
from umbel.sim.data.partition.partition import Indices
from umbel.sim.fleet.build import build_fleet
from umbel.sim.fleet.fates import CohortAsk
from umbel.sim.fleet.fleet import ALL_WAIT_MAX, Fleet
from umbel.sim.fleet.presence import HOUR_S
from umbel.sim.fleet.section import (
    ChargingSection,
    CorruptSection,
    DropoutsSection,
    FleetSection,
    HoursSection,
    MaliciousSection,
    NetworkSection,
    PresenceSection,
    SpeedSection,
)

FULL = FleetSection(
    zones=(0.0, 8.0),
    speed=SpeedSection(step_s=2.0, tail=1.5),
    hours=HoursSection(),
    dropouts=DropoutsSection(per_round=0.2, per_hour=0.5, returns=0.3, by_hour=(1.0, 0.5) * 12),
    corrupt=CorruptSection(0.1),
    malicious=MaliciousSection(0.1),
)
MILLION = 1_000_000


def made(section: FleetSection = FULL, seed: int = 1) -> Fleet:
    return build_fleet(section, seed, Path())


def ask_of(steps: Indices) -> CohortAsk:
    return CohortAsk(steps, 32, np.array([4_000_000]), np.array([1_000_000]), 600.0)


@given(
    st.integers(0, 1 << 62),
    st.lists(st.integers(0, 10**7), min_size=1, max_size=30, unique=True),
    st.integers(1, 1000),
    st.integers(1, 5),
    st.floats(0, 1e7),
    st.integers(0, 1 << 32),
    st.booleans(),
)
def test_a_device_has_its_fate_whoever_else_is_asked_in_whatever_order(
    seed: int, devices: list[int], number: int, attempt: int, now: float, order: int, charges: bool
) -> None:
    section = replace(FULL, hours=None, charging=ChargingSection()) if charges else FULL
    fleet, rng = made(section, seed), np.random.default_rng(order)
    cohort = np.array(devices)
    steps = rng.integers(1, 100, len(cohort))
    chosen = rng.permutation(len(cohort))[: len(cohort) // 2 + 1]
    whole = fleet.fates(cohort, number, attempt, now, ask_of(steps))
    part = fleet.fates(cohort[chosen], number, attempt, now, ask_of(steps[chosen]))
    for field in fields(whole):
        if field.name not in ("ask", "lines", "noticed_s"):
            assert getattr(whole, field.name)[chosen].tobytes() == getattr(part, field.name).tobytes(), field.name


def test_another_seed_round_or_attempt_is_another_fate() -> None:
    cohort = np.arange(200)
    seen = [
        made(seed=seed).fates(cohort, number, attempt, 0.0, ask_of(np.full(200, 50))).report_s.tobytes()
        for seed, number, attempt in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1))
    ]
    assert len(set(seen)) == 4
    assert seen[0] == seen[-1]


@given(st.integers(0, 1 << 62), st.integers(1, 5000), st.integers(1, 400), st.floats(0, 1e6))
def test_who_waits_is_there_and_counted_once(seed: int, n_devices: int, n_wanted: int, now: float) -> None:
    fleet = made(seed=seed)
    waiting = fleet.waiting(now, 1, 1, n_devices, n_wanted)
    assert (np.diff(waiting) > 0).all()
    everybody = np.arange(n_devices)
    there = everybody[fleet.presence.is_present(everybody, now)]
    assert np.isin(waiting, there).all()
    n_most = n_devices if n_devices <= ALL_WAIT_MAX else int(np.ceil(fleet.waiting_factor * n_wanted))
    assert len(waiting) == min(len(there), n_most)


def test_of_a_large_fleet_all_wait_equally_often_and_others_each_time() -> None:
    fleet = made(replace(FULL, hours=None))
    rounds = [fleet.waiting(0.0, number, 1, MILLION, 1000) for number in range(1, 30)]
    require_drawn((np.concatenate(rounds) + 0.5) / MILLION)
    assert len(np.intersect1d(rounds[0], rounds[1])) < 20
    assert rounds[0].tolist() != fleet.waiting(0.0, 1, 2, MILLION, 1000).tolist()


def test_a_round_of_a_million_devices_costs_memory_for_its_cohort_alone() -> None:
    """A byte for each device would already be more than is allowed."""
    fleet = made()
    fleet.fates(fleet.waiting(3e4, 1, 1, MILLION, 100), 1, 1, 3e4, ask_of(np.full(150, 50)))  # imports and caches
    tracemalloc.start()
    waiting = fleet.waiting(3e4, 2, 1, MILLION, 100)
    fleet.fates(waiting, 2, 1, 3e4, ask_of(np.full(len(waiting), 50)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(waiting) == 150
    assert peak < 500_000


def test_nobody_there_is_nobody_waiting() -> None:
    nobody = HoursSection(by_hour=(0.0,) * 24)
    assert not len(made(replace(FULL, hours=nobody)).waiting(0.0, 1, 1, 30_000, 10))


@pytest.mark.parametrize(
    ("section", "hours_there"),
    [
        (FleetSection(), [0, 6, 12, 18]),
        (FleetSection(charging=ChargingSection(plugged_at=11.0, hours=3.0, spread_h=0.0)), [12]),
        (FleetSection(hours=HoursSection(by_hour=(0.0,) * 18 + (1.0,) + (0.0,) * 5)), [18]),
    ],
    ids=["always", "charging", "hours"],
)
def test_devices_are_there_when_the_section_says(section: FleetSection, hours_there: list[int]) -> None:
    presence, devices = made(section).presence, np.arange(50)
    there = {hour: presence.is_present(devices, (24 * 9 + hour) * HOUR_S) for hour in (0, 6, 12, 18)}
    assert [hour for hour, are_there in there.items() if are_there.all()] == hours_there
    assert [hour for hour, are_there in there.items() if are_there.any()] == hours_there


def test_samples_per_second_make_larger_batches_take_longer() -> None:
    fleet = made(FleetSection(speed=SpeedSection(samples_per_s=100.0, spread=0.0, jitter=0.0)))
    for batch_size in (1, 10, 100):
        ask = replace(ask_of(np.array([5])), batch_size=batch_size)
        assert fleet.fates(np.array([3]), 1, 1, 0.0, ask).step_s[0] == pytest.approx(batch_size / 100)


def test_files_are_found_where_the_experiment_or_the_data_lie(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "phones.json").write_text('{"a": {"down_u": 1, "down_sigma": 0, "up_u": 2, "up_sigma": 0}}')
    (tmp_path / "there.csv").write_text("device,from_s,until_s\nx,0,10\n")
    section = FleetSection(network=NetworkSection(phones="phones.json"), presence=PresenceSection("there.csv", 20.0))
    fleet = build_fleet(section, 1, tmp_path, tmp_path / "data")
    lines = fleet.network.lines(np.array([0]), 1, 1)
    assert (lines.down[0], lines.up[0]) == (pytest.approx(1000.0), pytest.approx(2000.0))
    assert [fleet.presence.is_present(np.array([0]), now)[0] for now in (5.0, 15.0)] == [True, False]
    with pytest.raises(ValueError, match="no data folder was given: pass it with --data"):
        build_fleet(section, 1, tmp_path)


@pytest.mark.parametrize(
    ("section", "key", "name"),
    [
        (FleetSection(presence=PresenceSection("there.csv")), "fleet.presence.file", "there.csv"),
        (FleetSection(recorded="trace.json"), "fleet.recorded", "trace.json"),
        (FleetSection(network=NetworkSection(phones="phones.json")), "fleet.network.phones", "data/phones.json"),
    ],
)
def test_a_file_that_is_missing_is_told_with_its_key(
    tmp_path: Path, section: FleetSection, key: str, name: str
) -> None:
    with pytest.raises(ValueError, match=f"^{key} names {tmp_path / name}, which cannot be read: No such file"):
        build_fleet(section, 1, tmp_path, tmp_path / "data")
