"""What a report says, held against its round and its update: every bound from both sides."""

from dataclasses import replace

import pytest

from umbel.aggregation.errors import ReportRefused
from umbel.aggregation.plans.round import RoundPlan, Task, Weighting
from umbel.aggregation.reports import EvaluationDone, MaskedInput, Probe, Work, WorkDone
from umbel.aggregation.round.cohort import Member
from umbel.aggregation.round.states import Reported, SecureSide, Training
from umbel.aggregation.secagg.section import SecureAggregationSection
from umbel.aggregation.secagg.turns import Exchange
from umbel.aggregation.types import ClientId, RunId
from umbel.server.problems import Refused
from umbel.server.runs.decision import check_report
from umbel.server.store.stored import StoredUpload

WARD, MOST, ANNOUNCED = ClientId("ward"), 100, 60
PLAN = RoundPlan(RunId("demo"), 1, 1, 1, 1, 1.0, 60.0, Weighting.SAMPLES, MOST, 8.0, seed=1)
DIGEST = "a" * 64
UPLOAD = StoredUpload(10, 10, DIGEST, is_complete=True)
DONE = WorkDone(ANNOUNCED, 4, 4, DIGEST)
MASKED = MaskedInput(DIGEST, "A" * 86 + "==")
SECRET = Exchange.begun(bytes(48), 0.0, 60.0)


def check(
    work: Work,
    upload: StoredUpload | None = UPLOAD,
    task: Task = Task.TRAINING,
    exchange: Exchange | None = None,
    announced: int = ANNOUNCED,
    section: SecureAggregationSection | None = None,
    is_fair: bool = False,
) -> None:
    secure = SecureSide(exchange) if exchange else None
    state = Training(replace(PLAN, task=task), {WARD: Member(1, announced)}, 0.0, secure=secure)
    check_report(state, Reported(1.0, WARD, work), upload, section, is_fair=is_fair)


def test_what_was_asked_may_count() -> None:
    check(DONE)
    check(replace(DONE, sample_count=1))
    check(MASKED, exchange=SECRET)
    check(EvaluationDone(ANNOUNCED, {"loss": 1.0}), None, Task.EVALUATION)
    check(replace(DONE, probe=Probe(9, 0.1)), task=Task.CANARY)


def test_no_more_samples_than_were_announced() -> None:
    with pytest.raises(ReportRefused, match="sample_count 61 is more than the 60 that this client announced"):
        check(replace(DONE, sample_count=ANNOUNCED + 1))


def test_no_more_samples_than_the_run_counts() -> None:
    check(replace(DONE, sample_count=MOST), announced=MOST + 1)
    with pytest.raises(
        ReportRefused, match="sample_count: 101 samples are more than the run's sample_count_max of 100"
    ):
        check(replace(DONE, sample_count=MOST + 1), announced=MOST + 1)


def test_no_more_samples_measured_than_the_run_counts() -> None:
    measured = replace(DONE, evaluation={"loss": 1.0}, evaluation_sample_count=1)
    check(replace(measured, evaluation_sample_count=MOST))
    with pytest.raises(ReportRefused, match="evaluation: 101 samples"):
        check(replace(measured, evaluation_sample_count=MOST + 1))
    check(EvaluationDone(MOST, {"loss": 1.0}), None, Task.EVALUATION)
    with pytest.raises(ReportRefused, match="101 samples"):
        check(EvaluationDone(MOST + 1, {"loss": 1.0}), None, Task.EVALUATION)


@pytest.mark.parametrize("upload", [None, replace(UPLOAD, offset=9, is_complete=False)])
def test_no_report_without_its_whole_update(upload: StoredUpload | None) -> None:
    for work, exchange in ((DONE, None), (MASKED, SECRET)):
        with pytest.raises(Refused) as refusal:
            check(work, upload, exchange=exchange)
        assert refusal.value.kind == "upload-incomplete"


def test_no_report_of_another_update_than_was_uploaded() -> None:
    for work, exchange in ((DONE, None), (MASKED, SECRET)):
        with pytest.raises(ReportRefused, match="is not the hash of the uploaded update"):
            check(work, replace(UPLOAD, sha256="b" * 64), exchange=exchange)


def test_a_secure_round_takes_masked_updates_and_no_others() -> None:
    with pytest.raises(ReportRefused, match="this is a secure round"):
        check(DONE, exchange=SECRET)
    with pytest.raises(ReportRefused, match="this is not a secure round"):
        check(MASKED)


@pytest.mark.parametrize(
    ("work", "task", "sentence"),
    [
        (DONE, Task.CANARY, "needs the measurements in `probe`"),
        (replace(DONE, probe=Probe(9, 0.1)), Task.TRAINING, "only a report of a canary round may have `probe`"),
        (DONE, Task.EVALUATION, "this assignment asks to measure the model"),
        (EvaluationDone(9, {"loss": 1.0}), Task.TRAINING, "this assignment asks to train"),
        (EvaluationDone(9, {"loss": 1.0}), Task.CANARY, "this assignment asks to train"),
    ],
)
def test_a_report_is_of_the_kind_that_was_asked_for(work: Work, task: Task, sentence: str) -> None:
    with pytest.raises(ReportRefused, match=sentence):
        check(work, task=task)


def test_counts_have_the_lengths_of_the_run_file_if_it_names_them() -> None:
    """Also where its section is disabled, so that a plain rehearsal finds what a secure run would leave out."""
    section = SecureAggregationSection(enabled=False, counts={"confusion": 4}, evaluation_counts={"scores": 8})
    check(replace(DONE, counts={"confusion": (1,) * 4, "n": (1, 2)}), section=section)
    check(replace(DONE, counts={"confusion": (1,) * 9}))
    with pytest.raises(ReportRefused, match="9 numbers of counts 'confusion', and the run file asks for 4"):
        check(replace(DONE, counts={"confusion": (1,) * 9}), section=section)
    measured = EvaluationDone(ANNOUNCED, {}, evaluation_counts={"scores": (1,) * 6})
    with pytest.raises(ReportRefused, match="6 numbers of evaluation_counts 'scores'"):
        check(measured, None, Task.EVALUATION, section=section)


def test_qfedavg_needs_the_loss_and_the_norm_of_each_training() -> None:
    said = {"start_loss": 0.5, "change_norm": 0.0}
    check(replace(DONE, metrics=said), is_fair=True)
    check(replace(DONE, probe=Probe(9, 0.1)), task=Task.CANARY, is_fair=True)
    for lacking in said:
        for metrics in ({name: value for name, value in said.items() if name != lacking}, {**said, lacking: -1e-9}):
            with pytest.raises(ReportRefused, match=f"q-FedAvg, which needs the metric {lacking} of each training"):
                check(replace(DONE, metrics=metrics), is_fair=True)
