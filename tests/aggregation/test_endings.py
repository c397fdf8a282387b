"""What follows an attempt that made no model: how a run's limits hold there too."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.endings import Known, abandoned, rolled_back
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.privacy.section import PrivacySection
from umbel.aggregation.records import VersionRecord
from umbel.aggregation.round import Abandoned
from umbel.aggregation.run_end import KeptVersion, RoundEnd
from umbel.aggregation.runfile import RunFile
from umbel.aggregation.runfile_sections import EvaluationSection, RoundsSection
from umbel.aggregation.secagg.section import SecureAggregationSection
from umbel.aggregation.types import ModelRef, RoundPlan

PLAIN = RunFile("demo", RoundsSection(3, target=8, minimum=6, attempts_max=4))
PRIVATE = replace(
    PLAIN,
    codec=CodecSection("integer", step=0.01, clip_norm=1.0),
    secure_aggregation=SecureAggregationSection(),
    privacy=PrivacySection(noise_multiplier=1.0),
)
KNOWN = Known((), opened_at=100.0, now=160.0)
OLD = KeptVersion(VersionRecord(0, "0" * 64, 100, 10.0), "1" * 64)
MODEL = ModelRef(2, "2" * 64, 100, "3" * 64)


@dataclass(frozen=True)
class Going:
    """A run that is made of this file, at version 2."""

    file: RunFile
    model: ModelRef = MODEL
    status: RunStatus = RunStatus.RUNNING
    reason: str = ""


def failed(plan: RoundPlan, *, was_revealed: bool = False) -> Abandoned:
    return Abandoned(plan, "too few came", {}, {}, {}, 100.0, 150.0, was_revealed=was_revealed)


def private_plan(n_released: int) -> RoundPlan:
    return replace(PRIVATE.first_plan(100), number=2, n_released=n_released)


def both(file: RunFile, state: Abandoned, status: RunStatus = RunStatus.RUNNING) -> Sequence[RoundEnd]:
    """The attempt was abandoned, or an operator rolled the model back."""
    run = Going(file, status=status)
    return abandoned(run, state, KNOWN), rolled_back(run, state, OLD, KNOWN)


@pytest.mark.parametrize(("n_released", "was_revealed"), [(3, False), (2, True)])
def test_a_private_run_whose_sums_are_all_revealed_makes_no_further_attempt(
    n_released: int, was_revealed: bool
) -> None:
    for end in both(PRIVATE, failed(private_plan(n_released), was_revealed=was_revealed)):
        assert (end.status, end.next_state) == (RunStatus.FINISHED, None)
        assert end.reason == "the privacy budget of 3 sums is spent: 3 sums were revealed"


@pytest.mark.parametrize(("n_released", "was_revealed"), [(2, False), (1, True)])
def test_a_private_run_with_a_sum_left_tries_again_and_counts_the_one_that_was_revealed(
    n_released: int, was_revealed: bool
) -> None:
    for end in both(PRIVATE, failed(private_plan(n_released), was_revealed=was_revealed)):
        assert end.status is RunStatus.RUNNING
        assert end.next_state is not None
        assert (end.next_state.plan.number, end.next_state.plan.attempt, end.next_state.plan.n_released) == (2, 2, 2)


def test_a_sum_that_was_revealed_costs_though_its_attempt_failed() -> None:
    for hidden, revealed in zip(
        both(PRIVATE, failed(private_plan(1))), both(PRIVATE, failed(private_plan(1), was_revealed=True)), strict=True
    ):
        assert hidden.record.epsilon is not None
        assert revealed.record.epsilon is not None
        assert 0 < hidden.record.epsilon < revealed.record.epsilon


def test_of_a_run_without_noise_no_cost_is_told_and_no_budget_is_spent() -> None:
    for end in both(PLAIN, failed(replace(PLAIN.round_plan(2, 1), n_released=9), was_revealed=True)):
        assert end.record.epsilon is None
        assert end.status is RunStatus.RUNNING


@pytest.mark.parametrize(("attempt", "status"), [(3, RunStatus.RUNNING), (4, RunStatus.FAILED)])
def test_a_run_fails_at_the_last_attempt_that_its_file_allows(attempt: int, status: RunStatus) -> None:
    end = abandoned(Going(PLAIN), failed(PLAIN.round_plan(2, attempt)), KNOWN)
    assert (end.status, end.next_state is None) == (status, status is RunStatus.FAILED)


def test_an_attempt_that_an_operator_ended_is_nobodys_failure() -> None:
    """Its successor begins at once, and it does not count against attempts_max."""
    end = abandoned(Going(PLAIN), failed(PLAIN.round_plan(2, 4)), KNOWN, by_order=True)
    assert end.status is RunStatus.RUNNING
    assert end.next_state is not None
    assert (end.next_state.plan.attempt, end.next_state.not_before, end.next_state.since) == (5, 0.0, 160.0)


def test_a_run_that_is_over_has_no_next_attempt() -> None:
    end, _ = both(PLAIN, failed(PLAIN.round_plan(2, 1)), RunStatus.STOPPED)
    assert (end.status, end.next_state) == (RunStatus.STOPPED, None)


def test_without_its_evaluation_a_run_goes_on_with_the_next_round() -> None:
    file = replace(PLAIN, evaluation=EvaluationSection(1, 3))
    for end in both(file, failed(file.evaluation_plan(2))):
        assert end.status is RunStatus.RUNNING
        assert end.next_state is not None
        assert (end.next_state.plan.number, end.next_state.plan.attempt) == (3, 1)


def test_a_rollback_stores_the_older_version_as_the_newest() -> None:
    end = rolled_back(Going(PLAIN), failed(PLAIN.round_plan(2, 1)), OLD, KNOWN)
    assert end.model is not None
    assert (end.model.ref.version, end.model.ref.sha256, end.model.rolled_back_to) == (3, OLD.record.sha256, 0)
    assert (end.model.master_sha256, end.model.parent_sha256) == (OLD.master_sha256, "2" * 64)
    assert end.record.committed is False
