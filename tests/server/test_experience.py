"""What a self-tuning run goes by survives a restart, does not grow, and counts no attempt twice."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from umbel.aggregation.records import ClientRecord, Fate, RoundRecord
from umbel.aggregation.tuning import OBSERVATIONS_MAX, Evidence
from umbel.aggregation.types import RunId, Task
from umbel.server.experience import Experience

RUN = RunId("demo")
EMPTY = RoundRecord("demo", 1, 1, True, "why", 1, None, 0.0, 62.0, 3, 1, 0, 2, 10, 0, 0, open_s=60.0, model_bytes=99)


def ended(number: int, n_clients: int = 10, attempt: int = 1) -> RoundRecord:
    clients = tuple(ClientRecord(f"c{i}", Fate.ACCEPTED, "", 1, report_s=float(number)) for i in range(n_clients))
    return replace(EMPTY, round=number, attempt=attempt, opened_at=number * 100.0, clients=clients)


def of(records: Sequence[RoundRecord]) -> tuple[Experience, list[int]]:
    """The experience of a run with these records, oldest first, and how many it asked for each time."""
    asked: list[int] = []

    async def newest(run: RunId, count: int) -> Sequence[RoundRecord]:
        assert run == RUN
        asked.append(count)
        return records[-count:]

    return Experience(RUN, newest), asked


def known(experience: Experience) -> list[float]:
    """The rounds of which something is known, by the times that `ended` gave their reports."""
    return sorted({one.seconds for one in experience.evidence(99, None, {}).observations})


def test_what_is_stored_is_taken_up_as_far_as_it_goes() -> None:
    experience, asked = of([ended(number) for number in range(1, 31)])
    asyncio.run(experience.start())
    assert asked == [4, 16, 64]
    assert known(experience) == [float(number) for number in range(1, 31)]
    assert len(experience.evidence(99, None, {}).observations) == 300


def test_large_rounds_are_not_read_by_the_dozen() -> None:
    experience, asked = of([ended(number, n_clients=4000) for number in range(1, 31)])
    asyncio.run(experience.start())
    assert asked == [4]
    assert known(experience) == [29.0, 30.0]
    assert len(experience.evidence(99, None, {}).observations) <= OBSERVATIONS_MAX


def test_an_attempt_larger_than_all_that_is_kept_is_kept() -> None:
    experience, _ = of([])
    experience.note(ended(1, n_clients=OBSERVATIONS_MAX + 5))
    assert known(experience) == [1.0]


def test_an_attempt_that_is_noted_twice_counts_once() -> None:
    experience, _ = of([ended(1), ended(2)])
    asyncio.run(experience.start())
    for record in (ended(2), ended(2, attempt=2), ended(2, attempt=2)):
        experience.note(record)
    assert len(experience.evidence(99, None, {}).observations) == 30


def test_what_another_replica_ended_is_found() -> None:
    records = [ended(1)]
    experience, _ = of(records)
    asyncio.run(experience.start())
    records.append(ended(2))
    asyncio.run(experience.look())
    assert known(experience) == [1.0, 2.0]


def test_an_evaluation_teaches_nothing_about_training() -> None:
    experience, _ = of([])
    experience.note(replace(ended(1), task=Task.EVALUATION))
    assert experience.evidence(99, 7, {"lab": 3}) == Evidence((), 99, 7, {"lab": 3})
