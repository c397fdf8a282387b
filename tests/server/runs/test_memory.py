"""What a replica knows of a run's past: read once, as far back as it takes, and whichever replica ended it."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.federations.server_device import Device, house, houses_over, run_file, small_state
from tests.servers.postgres import Cluster
from tests.servers.waits import until
from umbel.aggregation.canonical import CanonicalText
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.round import Task
from umbel.aggregation.run.records import ClientRecord, Fate, RoundRecord
from umbel.aggregation.run.tuning import OBSERVATIONS_MAX, TuningFacts
from umbel.aggregation.types import ClientId
from umbel.server.runs.bundle_facts import AttemptClients
from umbel.server.runs.driver import RunDriver
from umbel.server.runs.memory import ReportTimes, enough_of
from umbel.server.store.stored import StoredRecord

EMPTY = RoundRecord("demo", 1, 1, True, "why", 1, None, 0.0, 62.0, 3, 1, 0, 2, 10, 0, 0, open_s=60.0, model_bytes=99)


def stored(n_rounds: int, n_clients: int) -> list[StoredRecord]:
    clients = tuple(ClientRecord(f"c{i}", Fate.ACCEPTED, "", 1, report_s=1.0) for i in range(n_clients))
    return [StoredRecord(i, replace(EMPTY, round=i, clients=clients)) for i in range(1, n_rounds + 1)]


def read(records: Sequence[StoredRecord]) -> tuple[Sequence[StoredRecord], list[int]]:
    """What is read of these records, oldest first, and how many were asked for each time."""
    asked: list[int] = []

    async def newest(count: int) -> Sequence[StoredRecord]:
        asked.append(count)
        return records[-count:]

    return asyncio.run(enough_of(newest)), asked


def test_what_is_stored_is_taken_up_as_far_as_it_goes() -> None:
    records = stored(30, n_clients=10)
    assert read(records) == (records, [4, 16, 64])


def test_large_rounds_are_not_read_by_the_dozen() -> None:
    records = stored(30, n_clients=4000)
    assert read(records) == (records[-4:], [4])


async def train(devices: Sequence[Device], layout: Layout, n_rounds: int) -> None:
    for _ in range(n_rounds):
        await asyncio.gather(*(device.take_part(layout, torch.ones(layout.n_values)) for device in devices))


def sent_away_until(driver: RunDriver) -> list[float]:
    """When clients of a large fleet are told to come, as this replica has it."""
    driver.pacing.population = 50_000
    clients = [ClientId(f"phone-{i}") for i in range(9)]
    return [time.time() + driver.pacing.come_back_s(driver.state, driver.plan, one, 1.0) for one in clients]


async def knowing(driver: RunDriver, n_observations: int) -> None:
    """Wait until so many report times are known."""
    await until("enough report times", lambda: len(evidence_of(driver)) >= n_observations, lambda: evidence_of(driver))


def evidence_of(driver: RunDriver) -> Sequence[object]:
    known = driver.memory.known(driver.run, AttemptClients(0.0, (), CanonicalText(()), {}), ())
    return known.evidence.observations


@pytest.mark.slow
def test_a_replica_learns_the_rhythm_of_rounds_that_another_has_ended(tmp_path: Path, postgresql: Cluster) -> None:
    url = postgresql.new_database()

    async def scenario() -> None:
        async with house(tmp_path) as one, house(tmp_path) as other:
            layout = await one.begin(run_file(count=9, target=5, window_s=600), small_state())
            here, there = await one.driver(), await other.driver()  # which looks from now on
            await train(await one.devices(5), layout, 3)
            await knowing(here, 15)
            await knowing(there, 15)
            times = zip(sent_away_until(here), sent_away_until(there), strict=True)
            assert all(math.isclose(one_at, other_at, abs_tol=2.0) for one_at, other_at in times)

    with houses_over(lambda _: url):
        asyncio.run(scenario())


def test_a_round_that_is_noted_and_read_counts_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(count=3, target=2), small_state())
            await train(await it.devices(2), layout, 1)
            await it.ended(1)
            driver = await it.driver()
            await knowing(driver, 2)
            await driver.memory.look()
            assert len(evidence_of(driver)) == 2
        async with house(tmp_path) as it:
            assert len(evidence_of(await it.driver())) == 2

    asyncio.run(scenario())


def ended(number: int, n_clients: int = 10) -> RoundRecord:
    clients = tuple(ClientRecord(f"c{i}", Fate.ACCEPTED, "", 1, report_s=float(number)) for i in range(n_clients))
    return replace(EMPTY, round=number, opened_at=number * 100.0, clients=clients)


def known(times: ReportTimes) -> list[float]:
    """The rounds of which something is known, by the times that `ended` gave their reports."""
    return sorted({one.seconds for one in times.evidence(99, None, {}).observations})


def test_the_newest_attempts_are_kept_and_no_more_than_that() -> None:
    times = ReportTimes()
    for number in range(1, 31):
        times.note(ended(number, n_clients=4000))
    assert known(times) == [29.0, 30.0]
    assert len(times.evidence(99, None, {}).observations) <= OBSERVATIONS_MAX


def test_an_attempt_larger_than_all_that_is_kept_is_kept() -> None:
    times = ReportTimes()
    times.note(ended(1, n_clients=OBSERVATIONS_MAX + 5))
    assert known(times) == [1.0]


def test_an_evaluation_teaches_nothing_about_training() -> None:
    times = ReportTimes()
    times.note(replace(ended(1), task=Task.EVALUATION))
    assert times.evidence(99, 7, {"lab": 3}) == TuningFacts((), 99, 7, {"lab": 3})
