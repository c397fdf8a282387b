"""What a self-tuning run goes by does not grow, and tells of training alone."""

from dataclasses import replace

from umbel.aggregation.plans.round import Task
from umbel.aggregation.run.records import ClientRecord, Fate, RoundRecord
from umbel.aggregation.run.tuning import OBSERVATIONS_MAX, TuningFacts
from umbel.server.runs.experience import Experience

EMPTY = RoundRecord("demo", 1, 1, True, "why", 1, None, 0.0, 62.0, 3, 1, 0, 2, 10, 0, 0, open_s=60.0, model_bytes=99)


def ended(number: int, n_clients: int = 10) -> RoundRecord:
    clients = tuple(ClientRecord(f"c{i}", Fate.ACCEPTED, "", 1, report_s=float(number)) for i in range(n_clients))
    return replace(EMPTY, round=number, opened_at=number * 100.0, clients=clients)


def known(experience: Experience) -> list[float]:
    """The rounds of which something is known, by the times that `ended` gave their reports."""
    return sorted({one.seconds for one in experience.evidence(99, None, {}).observations})


def test_the_newest_attempts_are_kept_and_no_more_than_that() -> None:
    experience = Experience()
    for number in range(1, 31):
        experience.note(ended(number, n_clients=4000))
    assert known(experience) == [29.0, 30.0]
    assert len(experience.evidence(99, None, {}).observations) <= OBSERVATIONS_MAX


def test_an_attempt_larger_than_all_that_is_kept_is_kept() -> None:
    experience = Experience()
    experience.note(ended(1, n_clients=OBSERVATIONS_MAX + 5))
    assert known(experience) == [1.0]


def test_an_evaluation_teaches_nothing_about_training() -> None:
    experience = Experience()
    experience.note(replace(ended(1), task=Task.EVALUATION))
    assert experience.evidence(99, 7, {"lab": 3}) == TuningFacts((), 99, 7, {"lab": 3})
