"""Whether a report may count: what it says against what its round asked for, and against the update that is stored."""

from umbel.aggregation.errors import ReportRefused
from umbel.aggregation.round import Reported, RoundState, Training
from umbel.aggregation.task import Task
from umbel.aggregation.types import EvaluationDone, Work, WorkDone
from umbel.server.problems import Refused
from umbel.server.stored import StoredUpload


def check_report(state: RoundState, report: Reported, upload: StoredUpload | None) -> None:
    """Raise `ReportRefused` for a report that makes no sense, `Refused` for one that has no whole update."""
    assert isinstance(state, Training), "only an open round takes reports"
    _check_task(state.plan.task, report.work)
    work, count_max = report.work, state.plan.sample_count_max
    for name, count in (("sample_count", work.sample_count), ("evaluation", work.evaluation_sample_count)):
        if count > count_max:
            raise ReportRefused(
                f"{name}: {count} samples are over the run's sample_count_max {count_max}; "
                "report at most that, or raise it in the run file"
            )
    if isinstance(work, EvaluationDone):
        return
    if work.sample_count > (announced := state.cohort[report.client].sample_count):
        raise ReportRefused(
            f"sample_count {work.sample_count} is over the {announced} of this client's check-in, by which it was "
            "drawn; check in with all samples that training may use"
        )
    if upload is None or not upload.is_complete:
        raise Refused("upload-incomplete", "upload the whole update before reporting it")
    if upload.sha256 != work.update_sha256:
        raise ReportRefused("update_sha256 is not that of the uploaded update; report what was uploaded")


def _check_task(task: Task, work: Work) -> None:
    if isinstance(work, WorkDone) and (work.probe is not None) != task.tries_clients:
        raise ReportRefused(
            "this assignment is a canary's: say in `probe` what was measured"
            if task.tries_clients
            else "only a canary's report has a `probe`: leave it out"
        )
    if isinstance(work, WorkDone) != task.sends_updates:
        raise ReportRefused(
            "this assignment asks to train: send an update and its report, not an evaluation alone"
            if task.sends_updates
            else "this assignment asks to measure the model: send an evaluation, and no update"
        )
