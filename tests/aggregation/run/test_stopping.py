"""When a run ends early, and which of its versions is the best: the laws first, examples after them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.reports import EvaluationDone, WorkDone
from umbel.aggregation.run.records import Judged, VersionRecord
from umbel.aggregation.run.stopping import Direction, StopRule, expired, judge
from umbel.aggregation.types import METRIC_ABS_MAX, SAMPLE_COUNT_MAX

LOSS = "evaluation.loss"
VALUES = st.lists(st.none() | st.integers(-50, 50).map(lambda value: value / 10), max_size=30)
PATIENCE = st.none() | st.integers(1, 6)


def version(
    number: int, value: float | None, rolled_back_to: int | None = None, deleted: bool = False
) -> VersionRecord:
    return VersionRecord(
        number,
        f"{number:064x}",
        100,
        1.7e9 + number,
        rolled_back_to=rolled_back_to,
        judged=value,
        deleted_at=1.8e9 if deleted else None,
    )


def history(values: Sequence[float | None]) -> list[VersionRecord]:
    return [version(number, value) for number, value in enumerate(values)]


def slow_count(values: Sequence[float], min_delta: float) -> int:
    """How many of the last values have not improved on the best before them by more than `min_delta`."""
    best, n_since = float("inf"), 0
    for value in values:
        if value < best - min_delta:
            best, n_since = value, 0
        else:
            n_since += 1
    return n_since


@given(values=VALUES, patience=st.integers(1, 6), min_delta=st.sampled_from([0.0, 0.1, 1.0]))
def test_patience_is_lost_exactly_when_so_many_measurements_did_not_improve(
    values: list[float | None], patience: int, min_delta: float
) -> None:
    verdict = judge(StopRule(LOSS, patience=patience, min_delta=min_delta), history(values))
    measured = [value for value in values if value is not None]
    assert (verdict.reason is not None) == (slow_count(measured, min_delta) >= patience)


@given(values=VALUES, patience=PATIENCE, target=st.integers(-50, 50).map(lambda value: value / 10))
def test_less_of_a_loss_is_more_of_its_negative(
    values: list[float | None], patience: int | None, target: float
) -> None:
    least = judge(StopRule(LOSS, patience=patience, target=target), history(values))
    negated = history([None if value is None else -value for value in values])
    most = judge(StopRule(LOSS, Direction.MAX, patience, target=-target), negated)
    assert (least.reason is None) == (most.reason is None)
    assert (least.best and least.best.version) == (most.best and most.best.version)


@given(values=VALUES)
def test_the_best_is_the_earliest_of_the_least(values: list[float | None]) -> None:
    best = judge(StopRule(LOSS, patience=3), history(values)).best
    measured = [value for value in values if value is not None]
    if best is None:
        assert not measured
    else:
        assert best.value == min(measured)
        assert best.version == values.index(best.value)


@given(values=VALUES, target=st.integers(-50, 50).map(lambda value: value / 10))
def test_a_target_ends_a_run_exactly_when_it_is_reached(values: list[float | None], target: float) -> None:
    reason = judge(StopRule(LOSS, target=target), history(values)).reason
    assert (reason is not None) == any(value is not None and value <= target for value in values)


@given(values=VALUES, patience=st.integers(1, 6), to=st.integers(0, 5))
def test_a_rollback_begins_a_new_count_of_patience(values: list[float | None], patience: int, to: int) -> None:
    rule, past = StopRule(LOSS, patience=patience), history(values)
    back = [*past, version(len(past), None, rolled_back_to=to)]
    assert judge(rule, back).reason is None
    worse = [version(len(back) + i, 99.0) for i in range(patience - 1)]
    assert judge(rule, [*back, *worse]).reason is None
    if any(value is not None for value in values):
        assert judge(rule, [*back, *worse, version(99, 99.0)]).reason is not None


def test_what_training_says_can_be_the_metric_too() -> None:
    made = [VersionRecord(i, "0" * 64, 1, 0.0, round=i, judged=1.0 + i) for i in range(4)]
    verdict = judge(StopRule("training.loss", patience=3), made)
    assert verdict.reason == "training.loss has not improved in 3 measurements; the best is 1, of version 0"


SHA256 = "ab" * 32


def work(loss: float, held_out: float | None = None) -> WorkDone:
    evaluation = {} if held_out is None else {"loss": held_out}
    return WorkDone(
        10, 1, 1, SHA256, metrics={"loss": loss}, evaluation=evaluation, evaluation_sample_count=5 * len(evaluation)
    )


def test_a_rule_takes_its_metric_from_where_it_says() -> None:
    works = [work(1.0 + i / 10, 5.0 + i) for i in range(3)]
    of_training, of_evaluation = (
        StopRule(metric, patience=1).measured_by(works) for metric in ("training.loss", "evaluation.loss")
    )
    assert of_training == Judged(
        "training.loss", 1.1, 3, "the mean over 1 of 3 clients, without the 1 least and the 1 greatest"
    )
    assert of_training is not None
    assert of_evaluation is not None
    assert (of_evaluation.value, of_evaluation.is_of_evaluation, of_training.is_of_evaluation) == (6.0, True, False)
    assert StopRule("evaluation.accuracy", patience=1).measured_by(works) is None
    assert StopRule("evaluation.loss", patience=1).measured_by([work(1.0)] * 9) is None


def test_too_few_clients_decide_nothing_and_are_told_of() -> None:
    works = [
        EvaluationDone(10, {"loss": 0.1}),
        EvaluationDone(10, {"loss": 0.2}),
        EvaluationDone(10, {"accuracy": 1.0}),
    ]
    assert StopRule(LOSS, target=0.5).measured_by(works) == Judged(
        LOSS, None, 2, "2 clients have measured it, and it counts only if at least 3 do"
    )
    alone = StopRule(LOSS, target=0.5, minimum=1).measured_by(works[:1])
    assert alone == Judged(LOSS, 0.1, 1, "the mean over 1 client")


@given(
    honest=st.lists(st.floats(0.9, 1.1), min_size=9, max_size=9),
    lie=st.floats(-METRIC_ABS_MAX, METRIC_ABS_MAX),
    n_samples=st.integers(1, SAMPLE_COUNT_MAX),
)
def test_one_liar_of_ten_reaches_no_target_and_makes_no_version_the_best(
    honest: list[float], lie: float, n_samples: int
) -> None:
    rule = StopRule(LOSS, target=0.5)
    works = [EvaluationDone(10, {"loss": loss}) for loss in honest] + [EvaluationDone(n_samples, {"loss": lie})]
    first = rule.measured_by(works)
    later = rule.measured_by([EvaluationDone(10, {"loss": 0.7})] * 10)
    assert first is not None
    assert later is not None
    verdict = judge(
        rule, [replace(one, judged=v.value) for one, v in zip(history([None, None]), (first, later), strict=True)]
    )
    assert verdict.reason is None
    assert verdict.best is not None
    assert verdict.best.version == 1


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (lambda: StopRule("loss", patience=1), 'must be "evaluation.NAME"'),
        (lambda: StopRule("evaluation.", patience=1), 'must be "evaluation.NAME"'),
        (lambda: StopRule(LOSS), "set patience, target or both"),
        (lambda: StopRule(LOSS, patience=0), "patience must lie between 1 and"),
        (lambda: StopRule(LOSS, patience=1, min_delta=-1.0), "min_delta must lie between 0 and"),
        (lambda: StopRule(LOSS, target=float("nan")), "target must lie between"),
        (lambda: StopRule(LOSS, target=1.0, minimum=0), "minimum must lie between 1 and"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(rule: object, sentence: str) -> None:
    assert callable(rule)
    with pytest.raises(ValueError, match=sentence):
        rule()


@given(values=VALUES, n_kept=st.integers(1, 9), deleted=st.sets(st.integers(1, 25)))
def test_retention_keeps_the_first_the_best_and_the_newest(
    values: list[float | None], n_kept: int, deleted: set[int]
) -> None:
    rule = StopRule(LOSS, patience=3)
    best = judge(rule, history(values)).best
    deleted -= {best.version} if best else set()
    past = [version(i, value, deleted=i in deleted) for i, value in enumerate(values)]
    gone = set(expired(past, n_kept, rule))
    here = [one.version for one in past if one.deleted_at is None]
    kept = [number for number in here if number not in gone]
    assert gone <= set(here), "what was deleted is not deleted again"
    assert set(here[-n_kept:]) <= set(kept)
    assert not here or 0 in kept
    assert best is None or best.version in kept
    assert len(kept) <= n_kept + 2
    assert expired([one for one in past if one.version in kept], n_kept, rule) == ()


def test_all_versions_are_kept_where_the_run_file_says_so() -> None:
    assert expired(history([1.0] * 9), None, None) == ()
    assert expired(history([1.0] * 9), 2, None) == (1, 2, 3, 4, 5, 6)


def test_a_figure_of_counts_is_judged_by_each_clients_own_value() -> None:
    """Not by the sum: one client with a thousand made-up negatives would set the specificity of all."""
    rule = StopRule("evaluation.confusion.specificity", Direction.MAX, patience=3)
    honest = [EvaluationDone(10, {}, evaluation_counts={"confusion": (1, 4, 1, 4)})] * 4
    liar = EvaluationDone(10, {}, evaluation_counts={"confusion": (0, 0, 0, 1 << 40)})
    without = EvaluationDone(10, {}, evaluation_counts={"confusion": (5, 0, 5, 0)})
    judged = rule.measured_by([*honest, liar, without])
    assert judged is not None
    assert (judged.value, judged.clients) == (0.5, 5)
    training = StopRule("training.confusion.sensitivity", target=0.9, minimum=1)
    found = training.measured_by([WorkDone(10, 1, 1, "0" * 64, counts={"confusion": (3, 0, 1, 0)})])
    assert found is not None
    assert found.value == 0.75


def test_a_figure_of_masked_sums_is_judged_by_the_clients_that_have_its_counts() -> None:
    rule = StopRule("evaluation.scores.auc", Direction.MAX, patience=3, minimum=2)
    values = {"evaluation.scores.auc": 0.9, "evaluation.loss": 0.5}
    found = rule.measured_in_sum(values, {"evaluation.scores.auc": 1}, {"evaluation.scores.auc": 4})
    assert found == Judged(rule.metric, 0.9, 4, "from the counts of 4 clients, from a masked sum")
    too_few = rule.measured_in_sum(values, {}, {"evaluation.scores.auc": 1})
    assert (too_few.value, too_few.clients) == (None, 1)
    mean = replace(rule, metric="evaluation.loss").measured_in_sum(values, {"evaluation.loss": 3}, {})
    assert mean == Judged("evaluation.loss", 0.5, 3, "the mean of 3 clients, from a masked sum")
