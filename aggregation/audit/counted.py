"""The auditor's check of counts: sums of them and the figures that follow are what the clients' reports give."""

from collections.abc import Iterable, Mapping
from typing import Any

from umbel.aggregation.audit.bundle import AuditFailed, RoundEnded
from umbel.aggregation.counts import COUNT_MAX, CountsByName, sum_of_counts
from umbel.aggregation.run.derived_metrics import derived_metrics


def check_counts(ended: RoundEnded, reports: Iterable[Mapping[str, Any]]) -> None:
    """Raise `AuditFailed` for sums of counts that the reports do not give, or figures that the sums do not give.

    `reports`: the bodies of the accepted reports, as JSON objects. Nothing is checked of a bundle without counts,
    because a coordinator of an earlier version left those of reports out. Reports of a secure round say no counts; then
    names, lengths and bounds are checked.
    """
    sums = {"counts": ended.counts, "evaluation_counts": ended.evaluation_counts}
    if not any(sums.values()):
        return
    bodies = list(reports)
    for name, found in sums.items():
        if ended.plan.secure is None:
            _require_sums(name, found, sum_of_counts(_counts_in(body, name) for body in bodies))
        else:
            _require_possible(name, found, getattr(ended.plan.secure, name), len(bodies))
    for found, means in ((ended.counts, ended.metrics), (ended.evaluation_counts, ended.evaluation)):
        for figure, value in derived_metrics(found).items():
            if means.get(figure) != value:
                raise AuditFailed(f"its {figure} is {means.get(figure)}, but its counts give {value}")


def _require_sums(name: str, found: CountsByName, expected: CountsByName) -> None:
    if dict(found) != expected:
        wrong = sorted(one for one in found.keys() | expected.keys() if found.get(one) != expected.get(one))
        raise AuditFailed(f"its `{name}` are not the sums of its reports' counts: {', '.join(wrong)}")


def _require_possible(name: str, found: CountsByName, asked: Mapping[str, int], n_clients: int) -> None:
    for one, numbers in found.items():
        if asked.get(one) != len(numbers):
            raise AuditFailed(f"its `{name}` have {len(numbers)} numbers of {one!r}, which its plan does not ask")
        if not all(0 <= number <= n_clients * COUNT_MAX for number in numbers):
            raise AuditFailed(f"its `{name}` have a number of {one!r} that {n_clients} clients cannot add up to")


def _counts_in(body: Mapping[str, Any], name: str) -> dict[str, tuple[int, ...]]:
    """The counts of one report, read as the coordinator read them, which takes 2.0 and "2" as 2."""
    try:
        return {one: tuple(map(_whole, numbers)) for one, numbers in (body.get(name) or {}).items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise AuditFailed(f"a report's `{name}` are no lists of whole numbers by name") from error


def _whole(value: Any) -> int:
    number = int(value)
    if not isinstance(value, str) and number != value:
        raise ValueError(f"{value} is not a whole number")
    return number
