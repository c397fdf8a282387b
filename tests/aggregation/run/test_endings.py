"""What follows an attempt that made no model: how a run's limits hold there too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.counts import CountsByName
from umbel.aggregation.messages import Outcome, RunStatus
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.plans.masks import SumShown
from umbel.aggregation.plans.proximal import MuState
from umbel.aggregation.plans.round import RoundPlan, Task
from umbel.aggregation.plans.training import TrainingSection
from umbel.aggregation.privacy.section import PrivacySection, epsilon_after
from umbel.aggregation.reports import EvaluationDone, MaskedInput, Probe, WorkDone
from umbel.aggregation.round.cohort import Member
from umbel.aggregation.round.states import Abandoned, Accepted, Closing, SecureEnd
from umbel.aggregation.run.canary import CanaryClosed, CanaryUpdate
from umbel.aggregation.run.endings import EvaluationClosed, Known, abandoned, finished, rolled_back
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.records import ClientRecord, Fate, VersionRecord
from umbel.aggregation.run.run_end import KeptVersion, Measurement, RoundEnd
from umbel.aggregation.run.sections import CanarySection, EvaluationSection, RoundsSection
from umbel.aggregation.run.stopping import StopRule
from umbel.aggregation.secagg.section import SecureAggregationSection
from umbel.aggregation.types import ClientId

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
    return Abandoned(plan, "too few came", {}, {}, {}, 100.0, 150.0, secure=SecureEnd(was_revealed))


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


def test_a_canary_that_has_failed_is_tried_again_as_a_canary() -> None:
    file = replace(PLAIN, canary=CanarySection())
    end = abandoned(Going(file), failed(file.canary_plan(2)), KNOWN)
    assert end.next_state is not None
    assert (end.next_state.plan.task, end.next_state.plan.attempt) == (Task.CANARY, 3)


@pytest.mark.parametrize("window_s", [100.0, 1.0])
def test_only_a_canary_that_passes_names_the_model_that_it_was_held_with(window_s: float) -> None:
    """A whole round takes 2 s at the speed that its clients measured."""
    file = replace(PLAIN, rounds=replace(PLAIN.rounds, window_s=window_s), canary=CanarySection())
    work = WorkDone(10, 1, 1, "e" * 64, probe=Probe(2, 1.0))
    trial = CanaryClosed({site: CanaryUpdate(work, 100, 0.01) for site in SITES})
    end = finished(Going(file), closed(file.canary_plan(1), work), trial, KNOWN)
    passes = window_s == 100.0
    assert (end.record.committed, end.record.model_sha256) == (passes, MODEL.sha256 if passes else None)


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


# --- rounds that have closed ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Files:
    """What was made of a round's sum."""

    published: File = field(default_factory=lambda: File("a" * 64, 200))
    master_sha256: str = "b" * 64
    sum_sha256: str = "c" * 64
    n_values: int = 10
    update_rms: float | None = 0.125
    change: File | None = field(default_factory=lambda: File("d" * 64, 20))
    totals: None = None
    shown: None = None


SITES = tuple(ClientId(name) for name in ("north", "south", "west"))


def closed(plan: RoundPlan, work: WorkDone | EvaluationDone | MaskedInput) -> Closing:
    accepted = {site: Accepted(10, work) for site in SITES}
    cohort = {site: Member(1, 10) for site in SITES}
    return Closing(plan, cohort, accepted, {}, Outcome.SURPLUS, "3 of 3 have reported", 100.0, 150.0)


def committed(file: RunFile, number: int, loss: float = 1.0, known: Known = KNOWN, n_released: int = 0) -> RoundEnd:
    plan = replace(file.first_plan(100), number=number, n_released=n_released)
    work = WorkDone(10, 4, 4, "e" * 64, metrics={"loss": loss})
    return finished(Going(file), closed(plan, work), Files(), known)


def test_a_round_that_is_made_is_the_next_version_and_the_next_round_follows() -> None:
    end = committed(PLAIN, 2)
    assert end.model is not None
    assert (end.model.ref, end.model.round, end.model.parent_sha256) == (
        ModelRef(3, "a" * 64, 200, "3" * 64),
        2,
        "2" * 64,
    )
    assert (end.model.master_sha256, end.model.sum_sha256, end.model.metrics) == ("b" * 64, "c" * 64, {"loss": 1.0})
    assert end.model.update_rms == 0.125, "the next step is made of it"
    assert end.model.change is not None
    assert (end.model.change.sha256, end.model.change.size_bytes) == ("d" * 64, 20)
    assert end.next_state is not None
    assert (end.status, end.next_state.plan.number, end.next_state.plan.attempt) == (RunStatus.RUNNING, 3, 1)
    assert end.next_state.since == KNOWN.now


def test_a_window_that_tunes_itself_goes_by_the_round_that_has_just_ended() -> None:
    file = replace(PLAIN, rounds=replace(PLAIN.rounds, self_tuning=True))
    clients = tuple(ClientRecord(site, Fate.ACCEPTED, "counts", 10, report_s=12.0) for site in SITES)
    end = committed(file, 2, known=replace(KNOWN, clients=clients))
    assert end.next_state is not None
    assert end.next_state.plan.tuned == "as the run file says: only 3 clients' times in 1 round are known"


def test_the_automatic_step_is_as_fine_as_the_updates_that_counted_left_time_for() -> None:
    """At 100 bytes a second, a twentieth of the window takes 3,000 bytes. A lost client's bytes do not count."""
    file = replace(PLAIN, rounds=replace(PLAIN.rounds, window_s=600.0), codec=CodecSection("auto"))
    plan, work = file.first_plan(100), WorkDone(10, 4, 4, "e" * 64, upload_bytes_per_s=100.0)
    lost = ClientRecord("east", Fate.LOST, "silent", 10, bytes_up=10**9)

    def inverse_step_after(update_bytes: int) -> float:
        clients = [ClientRecord(site, Fate.ACCEPTED, "counts", 10, bytes_up=update_bytes) for site in SITES]
        end = finished(Going(file), closed(plan, work), Files(), replace(KNOWN, clients=(*clients, lost)))
        assert end.next_state is not None
        return end.next_state.plan.codec.inverse_step

    assert inverse_step_after(1_000) > inverse_step_after(3_001)


@pytest.mark.parametrize(("count", "words"), [(1, "the one round is committed"), (3, "all 3 rounds are committed")])
def test_after_its_last_round_a_run_is_finished(count: int, words: str) -> None:
    end = committed(replace(PLAIN, rounds=replace(PLAIN.rounds, count=count)), count)
    assert (end.status, end.reason, end.next_state) == (RunStatus.FINISHED, words, None)


@pytest.mark.parametrize(("n_before", "status"), [(1, RunStatus.RUNNING), (2, RunStatus.FINISHED)])
def test_a_private_round_spends_of_the_budget_and_the_last_of_it_ends_the_run(n_before: int, status: RunStatus) -> None:
    """A sum of an attempt that failed has cost too, so the budget may end before the rounds do."""
    end = committed(PRIVATE, 2, n_released=n_before)
    assert (end.status, end.n_released) == (status, n_before + 1)
    secure, section = PRIVATE.first_plan(100).secure, PRIVATE.privacy
    assert secure is not None
    assert secure.noise is not None
    assert section is not None
    assert end.record.epsilon == epsilon_after(secure.noise, section.delta, n_before + 1), "its own sum, too"


def test_a_target_that_is_reached_ends_the_run_with_how_it_was_measured() -> None:
    file = replace(PLAIN, stop=StopRule("training.loss", target=0.5, minimum=3))
    past = replace(KNOWN, history=(OLD,))
    assert committed(file, 1, 0.6, past).status is RunStatus.RUNNING
    end = committed(file, 1, 0.5, past)
    assert (end.status, end.next_state) == (RunStatus.FINISHED, None)
    assert end.reason.startswith("stopped early after round 1 of 3: ")
    assert end.reason.endswith("(the mean over 1 of 3 clients, without the 1 least and the 1 greatest)")


def test_an_evaluation_asks_clients_that_did_not_train_and_then_the_run_goes_on() -> None:
    file = replace(PLAIN, evaluation=EvaluationSection(2, 3))
    after_first, after_second = committed(file, 1).next_state, committed(file, 2).next_state
    assert after_first is not None
    assert after_second is not None
    assert after_first.plan.task is Task.TRAINING
    assert (after_second.plan.task, after_second.plan.number, after_second.excluded) == (Task.EVALUATION, 2, SITES)
    end = finished(
        Going(file), closed(after_second.plan, EvaluationDone(10, {"loss": 0.25})), EvaluationClosed(), KNOWN
    )
    assert end.model is None
    assert end.measured is not None
    assert (end.measured.version, end.measured.means) == (2, {"loss": 0.25})
    assert end.record.partial == 0, "who was asked for no training has left none of it out"
    assert end.next_state is not None
    assert (end.next_state.plan.task, end.next_state.plan.number, end.next_state.excluded) == (Task.TRAINING, 3, ())


def test_where_others_measure_what_those_who_trained_have_measured_does_not_count() -> None:
    work = WorkDone(10, 4, 4, "e" * 64, evaluation={"loss": 0.25}, evaluation_sample_count=5)
    for file, is_measured in ((PLAIN, True), (replace(PLAIN, evaluation=EvaluationSection(1, 3)), False)):
        end = finished(Going(file), closed(file.first_plan(100), work), Files(), KNOWN)
        assert (end.measured is not None) == is_measured


def test_a_measurement_of_a_version_decides_whether_the_run_ends() -> None:
    rule = StopRule("evaluation.loss", target=0.5, minimum=3)
    file = replace(PLAIN, evaluation=EvaluationSection(1, 3), stop=rule)
    newest = KeptVersion(VersionRecord(2, "2" * 64, 100, 20.0, round=1), "1" * 64)
    known = replace(KNOWN, history=(OLD, newest))
    for loss, status in ((0.6, RunStatus.RUNNING), (0.4, RunStatus.FINISHED)):
        done = closed(file.evaluation_plan(1), EvaluationDone(10, {"loss": loss}))
        assert finished(Going(file), done, EvaluationClosed(), known).status is status


MASKED = replace(
    PLAIN,
    rounds=RoundsSection(2, target=4, minimum=3, over_selection=1.0),
    codec=CodecSection("integer"),
    secure_aggregation=SecureAggregationSection(evaluation=("loss",)),
    training=TrainingSection(evaluate=True),
)


@dataclass(frozen=True)
class Sums:
    """What the sum of an evaluation of four clients says."""

    evaluation: Mapping[str, float]
    n_partial: int = 0
    sample_count: int = 40
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    counts: CountsByName = field(default_factory=dict[str, tuple[int, ...]])
    evaluation_counts: CountsByName = field(default_factory=dict[str, tuple[int, ...]])
    measured_by: Mapping[str, int] = field(default_factory=lambda: {"evaluation.loss": 4})
    counted_by: Mapping[str, int] = field(default_factory=dict[str, int])
    overfull: frozenset[str] = frozenset()


@dataclass(frozen=True)
class MaskedModel(Sums):
    """The model of a masked round."""

    evaluation: Mapping[str, float] = field(default_factory=dict[str, float])
    published: ModelRef = MODEL
    master_sha256: str = ""
    sum_sha256: str = "4" * 64
    n_values: int = 1000
    update_rms: float | None = None
    change: ModelRef | None = None
    shown: SumShown = field(default_factory=lambda: SumShown(4, 0.02, 0.03, 0.0))

    @property
    def totals(self) -> Sums:
        return self


def masked_round(file: RunFile, number: int) -> RoundEnd:
    plan = replace(file.first_plan(1000), number=number)
    return finished(Going(file), closed(plan, MaskedInput("5" * 64, f"{'A' * 86}==")), MaskedModel(), KNOWN)


@pytest.mark.parametrize(
    ("file", "is_measured"),
    [
        (MASKED, True),
        (replace(MASKED, training=TrainingSection()), False),
        (replace(MASKED, secure_aggregation=SecureAggregationSection(evaluation=())), False),
        (replace(MASKED, training=TrainingSection(), evaluation=EvaluationSection(7, 3)), True),
        (replace(PLAIN, rounds=RoundsSection(2, target=4), training=TrainingSection(evaluate=True)), False),
    ],
)
def test_all_clients_of_a_masked_run_that_measures_its_models_measure_the_last_one(
    file: RunFile, *, is_measured: bool
) -> None:
    assert file.measures_last is is_measured
    assert [file.evaluates_after(number) for number in (1, 2)] == [False, is_measured]
    if not is_measured:
        return
    end = masked_round(file, 2)
    assert end.next_state is not None
    plan = end.next_state.plan
    assert (plan.task, plan.number, plan.attempt) == (Task.EVALUATION, 2, 1)
    assert (end.next_state.excluded, end.status) == ((), RunStatus.RUNNING), "the clients that trained take part"
    measured = finished(
        Going(file), closed(plan, MaskedInput("5" * 64, f"{'A' * 86}==")), EvaluationClosed(Sums({"loss": 0.5})), KNOWN
    )
    assert (measured.status, measured.reason) == (RunStatus.FINISHED, "all 2 rounds are committed")
    assert measured.measured == Measurement(MODEL.version, {"loss": 0.5})
    assert measured.record.evaluation == {"loss": 0.5}
    assert measured.record.sample_count == 40


def test_an_evaluation_hands_the_training_after_it_the_numbers_that_it_would_have_without_one() -> None:
    often = replace(MASKED, evaluation=EvaluationSection(1, 3))
    apart, direct = masked_round(often, 1).next_state, masked_round(MASKED, 1).next_state
    assert apart is not None
    assert direct is not None
    assert (apart.plan.task, apart.plan.n_wanted) == (Task.EVALUATION, 3)
    state = closed(apart.plan, MaskedInput("5" * 64, f"{'A' * 86}=="))
    after = finished(Going(often), state, EvaluationClosed(Sums({"loss": 0.5})), KNOWN).next_state
    assert after is not None
    assert after.plan == direct.plan
    missed = abandoned(Going(often), failed(apart.plan), KNOWN).next_state
    assert missed is not None
    assert missed.plan == direct.plan


def test_the_measurement_of_the_last_masked_model_counts_for_early_stopping() -> None:
    file = replace(MASKED, stop=StopRule("evaluation.loss", target=0.1, minimum=1))
    plan = masked_round(file, 2).next_state
    assert plan is not None
    state = closed(plan.plan, MaskedInput("5" * 64, f"{'A' * 86}=="))
    end = finished(Going(file), state, EvaluationClosed(Sums({"loss": 0.05})), KNOWN)
    assert end.measured is not None
    assert end.measured.judged == 0.05


def test_a_record_names_what_too_few_clients_have_and_not_how_many() -> None:
    plan = masked_round(MASKED, 2).next_state
    assert plan is not None
    found = {"evaluation.loss": 4, "evaluation.auc": 2, "evaluation.recall": 4, "training.loss": 0, "evaluation.acc": 0}
    sums = Sums({"loss": 0.5}, measured_by=found, counted_by={"evaluation.confusion": 1})
    state = closed(plan.plan, MaskedInput("5" * 64, f"{'A' * 86}=="))
    record = finished(Going(MASKED), state, EvaluationClosed(sums), KNOWN).record
    why = "fewer than 3 clients have it, which is the minimum of this round"
    nothing = "no client had anything to measure"
    unknown = "no client has it: compare the name in the run file with the sites' code"
    assert record.not_shown == {
        "evaluation.acc": unknown,
        "evaluation.auc": why,
        "evaluation.confusion": why,
        "evaluation.recall": nothing,
    }


@pytest.mark.parametrize(("what", "key"), [("training", "metrics"), ("evaluation", "evaluation")])
def test_a_record_says_if_clients_have_more_metrics_than_the_sum_has_room_for(what: str, key: str) -> None:
    plan = masked_round(MASKED, 2).next_state
    assert plan is not None
    sums = Sums({"loss": 0.5}, overfull=frozenset({what}))
    state = closed(plan.plan, MaskedInput("5" * 64, f"{'A' * 86}=="))
    record = finished(Going(MASKED), state, EvaluationClosed(sums), KNOWN).record
    assert record.evaluation == {"loss": 0.5}
    [(name, why)] = record.not_shown.items()
    assert name == f"{what}.*"
    assert f"list those that matter in `{key}` of [secure_aggregation]" in why


# --- an adaptive mu ---------------------------------------------------------------------------------------------------

ADAPTIVE = replace(PLAIN, training=TrainingSection(algorithm="fedprox", adaptive_mu=True))
RISEN = MuState(0.1, 2.0)


def after_losses(file: RunFile, losses: Sequence[float | None], known: Known = KNOWN) -> RoundEnd:
    """The end of the last of rounds with these losses."""
    plan, end = file.first_plan(100), None
    for loss in losses:
        work = WorkDone(10, 4, 4, "e" * 64, metrics={} if loss is None else {"loss": loss})
        end = finished(Going(file), closed(plan, work), Files(), known)
        plan = end.next_state.plan if end.next_state is not None else plan
    assert end is not None
    return end


@pytest.mark.parametrize("losses", [[1.0, 2.0], [1.0, None, 2.0], [1.5, 1.0, 2.0]])
def test_the_next_mu_follows_from_the_loss_in_the_records(losses: Sequence[float | None]) -> None:
    end = after_losses(replace(ADAPTIVE, rounds=RoundsSection(9, target=8)), losses)
    assert end.next_state is not None
    assert end.next_state.plan.mu == RISEN
    assert end.record.proximal_mu == 0.0, "that of the round itself"


def test_a_mu_that_does_not_adapt_is_in_no_plan_and_no_record() -> None:
    end = after_losses(replace(PLAIN, training=TrainingSection(algorithm="fedprox", proximal_mu=0.1)), [1.0, 2.0])
    assert end.next_state is not None
    assert (end.next_state.plan.mu, end.record.proximal_mu) == (None, None)


def test_an_evaluation_and_an_abandoned_attempt_hand_mu_on() -> None:
    file = replace(ADAPTIVE, evaluation=EvaluationSection(2, 3))
    evaluates = after_losses(file, [1.0, 2.0]).next_state
    assert evaluates is not None
    assert (evaluates.plan.task, evaluates.plan.mu) == (Task.EVALUATION, RISEN)
    done = closed(evaluates.plan, EvaluationDone(10, {"loss": 9.0}))
    measured = finished(Going(file), done, EvaluationClosed(), KNOWN)
    assert measured.next_state is not None
    assert (measured.next_state.plan.number, measured.next_state.plan.mu) == (3, RISEN)
    assert measured.record.proximal_mu is None, "its clients do not train"
    for plan in (evaluates.plan, measured.next_state.plan):
        again = abandoned(Going(file), failed(plan), KNOWN).next_state
        assert again is not None
        assert (again.plan.number, again.plan.mu) == (3, RISEN)


def test_a_canary_has_the_first_mu_and_so_has_round_one() -> None:
    file = replace(ADAPTIVE, canary=CanarySection())
    plan = file.first_plan(100)
    assert (plan.task, plan.mu) == (Task.CANARY, MuState(0.0))
    work = WorkDone(10, 1, 1, "e" * 64, metrics={"loss": 3.0}, probe=Probe(2, 1.0))
    end = finished(
        Going(file), closed(plan, work), CanaryClosed({one: CanaryUpdate(work, 100, 0.01) for one in SITES}), KNOWN
    )
    assert end.next_state is not None
    assert (end.next_state.plan.task, end.next_state.plan.mu) == (Task.TRAINING, MuState(0.0))
    assert end.record.proximal_mu == 0.0


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_a_rollback_comes_with_the_mu_of_its_version(*, is_evaluation: bool) -> None:
    losses = (None, 1.0, 2.0, 3.0, None, 4.0)  # of versions 0 to 5, of which 4 is a copy of 1
    history = [
        KeptVersion(
            VersionRecord(
                number,
                "0" * 64,
                100,
                10.0,
                rolled_back_to=1 if number == 4 else None,
                metrics={} if loss is None else {"loss": loss},
            ),
            "1" * 64,
        )
        for number, loss in enumerate(losses)
    ]
    plan = ADAPTIVE.evaluation_plan(2) if is_evaluation else ADAPTIVE.round_plan(3, 1)
    file = replace(ADAPTIVE, evaluation=EvaluationSection(1, 3))
    states = (MuState(0.0), MuState(0.0, 1.0), RISEN, MuState(0.2, 3.0), MuState(0.0, 1.0), MuState(0.1, 4.0))
    for version, mu in zip(history, states, strict=True):
        known = replace(KNOWN, history=history)
        end = rolled_back(Going(file), failed(replace(plan, mu=MuState(0.1, 4.0))), version, known)
        assert end.next_state is not None
        assert (end.next_state.plan.number, end.next_state.plan.mu) == (3, mu)


def test_the_loss_of_a_masked_round_is_that_of_its_sum() -> None:
    file = replace(MASKED, training=ADAPTIVE.training)
    state = closed(replace(file.first_plan(1000), mu=MuState(0.0, 1.0)), MaskedInput("5" * 64, f"{'A' * 86}=="))
    end = finished(Going(file), state, MaskedModel(metrics={"loss": 2.0}), KNOWN)
    assert end.next_state is not None
    assert end.next_state.plan.mu == RISEN
