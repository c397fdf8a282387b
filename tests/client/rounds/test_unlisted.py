"""What a masked sum leaves out is named once in the client's log, with the line that the run file lacks."""

import logging
import tomllib
from dataclasses import replace

import pytest

from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import RoundsSection
from umbel.aggregation.secagg.numbers.composition import Words
from umbel.aggregation.secagg.numbers.contribution import LocalWork
from umbel.aggregation.secagg.section import SecureAggregationSection
from umbel.client.policy.policy import SitePolicy
from umbel.client.policy.terms import as_sent
from umbel.client.rounds.unlisted import UnlistedMetrics

WORDS = Words(("loss",), ("loss", "accuracy"), 0, 4, 1000, {}, {"confusion": 4})
WORK = LocalWork(
    10,
    1,
    1,
    {"loss": 0.5, "f1": 0.25},
    {"loss": 0.5, "auc": 0.75, "personal.auc": 0.5},
    5,
    {"lesions": (3,)},
    {"confusion": (1, 2, 3, 4), "a/scores": (1, 2)},
)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "umbel.client")
    return caplog


def test_each_name_is_told_once_with_lines_that_a_run_file_can_have(logged: pytest.LogCaptureFixture) -> None:
    unlisted = UnlistedMetrics()
    unlisted.note(WORK, WORDS, is_private=False)
    said = [record.getMessage() for record in logged.records]
    assert [record.levelname for record in logged.records] == ["WARNING"] * 4
    assert "these metrics of held-out data stay at this site" in said[1]
    assert "does not list them: auc, personal.auc. To have" in said[1]
    lines = [one.partition("run file: ")[2] for one in said]
    table = tomllib.loads("\n".join(lines))
    section = SecureAggregationSection(
        metrics=tuple(table["metrics"]),
        evaluation=tuple(table["evaluation"]),
        counts=table["counts"],
        evaluation_counts=table["evaluation_counts"],
    )
    RunFile("run", RoundsSection(1, target=4, minimum=3, over_selection=1.0), secure_aggregation=section)
    assert section.metrics == ("loss", "f1")
    assert section.evaluation == ("loss", "accuracy", "auc", "personal.auc")
    assert section.evaluation_counts == {"confusion": 4, "a/scores": 2}
    logged.clear()
    unlisted.note(WORK, WORDS, is_private=False)
    assert not logged.records
    unlisted.note(replace(WORK, metrics={"recall": 1.0}), WORDS, is_private=False)
    assert [record.getMessage().partition("run file: ")[2] for record in logged.records] == [
        'metrics = ["loss", "recall"]'
    ]


def test_what_the_policy_keeps_or_the_run_lists_is_not_named(logged: pytest.LogCaptureFixture) -> None:
    kept = as_sent(SitePolicy(share_metrics=False), WORK)
    UnlistedMetrics().note(kept, WORDS, is_private=False)
    listed = replace(WORK, metrics={"loss": 1.0}, evaluation={"accuracy": 1.0}, counts={}, evaluation_counts={})
    UnlistedMetrics().note(listed, WORDS, is_private=False)
    assert not logged.records


def test_all_metrics_travel_and_what_has_no_room_is_named_once_with_what_to_do(
    logged: pytest.LogCaptureFixture,
) -> None:
    unlisted, words = UnlistedMetrics(), replace(WORDS, metrics="all", evaluation="all")
    unlisted.note(replace(WORK, counts={}, evaluation_counts={}), words, is_private=False)
    assert not logged.records
    many = {**{f"n{i:02}": 0.5 for i in range(32)}, "z": 0.5, "a" * 49: 0.5}
    for _ in range(2):
        unlisted.note(LocalWork(10, 1, 1, {**many}), words, is_private=False)
    [record] = logged.records
    said = record.getMessage()
    assert f"these metrics of the training stay at this site: {'a' * 49}, z. With metrics = " in said
    assert "32 metrics of one client, with names of at most 48" in said
    assert "list those that matter in metrics of [secure_aggregation]" in said


def test_a_private_run_says_once_why_no_metric_is_sent(logged: pytest.LogCaptureFixture) -> None:
    unlisted = UnlistedMetrics()
    for _ in range(2):
        unlisted.note(WORK, Words((), (), 0, 4, 1000), is_private=True)
    assert [record.getMessage() for record in logged.records] == [
        "metrics and counts stay at this site, because this private run would sum them without noise"
    ]
