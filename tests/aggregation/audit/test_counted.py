"""An auditor adds up the counts of all reports again, and makes the figures of the sums again."""

from dataclasses import replace
from typing import Any

import pytest

from tests.aggregation.audit.test_chain import played
from umbel.aggregation.audit.bundle import AuditFailed, RoundEnded
from umbel.aggregation.audit.counted import check_counts
from umbel.aggregation.run.derived_metrics import derived_metrics

SUM = {"confusion": (3, 1, 2, 8), "n": (5,)}
BODIES: list[dict[str, Any]] = [
    {"counts": {"confusion": [1, 1, 0, 4], "n": [5]}, "evaluation_counts": {"confusion": [1, 0, 0, 0]}},
    {"counts": {"confusion": [2, "0", 2.0, 4]}, "evaluation_counts": {"confusion": [0, 0, 1, 1]}},
    {"steps_done": 1},
]


def ended(**changed: Any) -> RoundEnded:
    _, _, committed = played()
    held_out = {"confusion": (1, 0, 1, 1)}
    facts = {
        "counts": SUM,
        "evaluation_counts": held_out,
        "metrics": {"loss": 0.5, **derived_metrics(SUM)},
        "evaluation": derived_metrics(held_out),
    }
    return replace(committed, **{**facts, **changed})


def test_sums_and_figures_that_follow_from_the_reports_pass() -> None:
    check_counts(ended(), BODIES)


def test_a_bundle_of_a_coordinator_before_counts_passes() -> None:
    check_counts(ended(counts={}, evaluation_counts={}, metrics={"loss": 0.5}, evaluation={}), BODIES)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"counts": {**SUM, "confusion": (3, 1, 2, 9)}}, "its `counts` are not the sums of its reports' counts: conf"),
        ({"counts": {"confusion": SUM["confusion"]}}, "its `counts` are not .*: n"),
        ({"counts": {**SUM, "more": (1,)}}, "its `counts` are not .*: more"),
        ({"counts": {}}, "its `counts` are not .*: confusion, n"),
        ({"evaluation_counts": {"confusion": (1, 0, 1, 2)}}, "its `evaluation_counts` are not the sums"),
        ({"metrics": {**derived_metrics(SUM), "confusion.f1": 0.9}}, "its confusion.f1 is 0.9, but its counts give"),
        ({"evaluation": {}}, "its confusion.sensitivity is None, but its counts give 0.5"),
    ],
)
def test_a_sum_or_a_figure_that_the_reports_do_not_give_is_found(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(AuditFailed, match=said):
        check_counts(ended(**changed), BODIES)


@pytest.mark.parametrize("wrong", [[1], {"n": 3}, {"n": ["x"]}, {"n": [2.5]}, {"n": [float("inf")]}, {"n": [None]}])
def test_a_report_whose_counts_cannot_be_read_fails_in_words(wrong: Any) -> None:
    with pytest.raises(AuditFailed, match="a report's `counts` are no lists of whole numbers by name"):
        check_counts(ended(), [{"counts": wrong}])
