"""Checks of a report or message before it counts, against what its round asks for and what is stored."""

import base64

from umbel.aggregation.errors import ReportRefused
from umbel.aggregation.plans.round import Task
from umbel.aggregation.reports import EvaluationDone, MaskedInput, Work, WorkDone
from umbel.aggregation.round.states import Closing, Reported, RoundState, Spoke, Training
from umbel.aggregation.secagg.messages import AdvertiseKeys
from umbel.aggregation.secagg.turns import Exchange, Phase
from umbel.server.problems import Refused
from umbel.server.store.stored import StoredUpload


def check_report(state: RoundState, report: Reported, upload: StoredUpload | None) -> None:
    """Raise `ReportRefused` for a wrong report, and `Refused` for one without a whole update."""
    assert isinstance(state, Training), "only an open round takes reports"
    _check_task(state.plan.task, report.work)
    is_secure = state.secure is not None
    if isinstance(report.work, MaskedInput) is not is_secure:
        raise ReportRefused(
            "this is a secure round: report a masked update, without counts or metrics"
            if is_secure
            else "this is not a secure round: report counts and metrics in clear"
        )
    work, count_max = report.work, state.plan.sample_count_max
    for name, count in (("sample_count", work.sample_count), ("evaluation", work.evaluation_sample_count)):
        if count > count_max:
            raise ReportRefused(
                f"{name}: {count} samples are over the run's sample_count_max {count_max}; "
                "report at most that, or raise it in the run file"
            )
    if isinstance(work, EvaluationDone):
        return
    if isinstance(work, WorkDone) and work.sample_count > (announced := state.cohort[report.client].sample_count):
        raise ReportRefused(
            f"sample_count {work.sample_count} is over the {announced} of this client's check-in, by which it was "
            "drawn; check in with all samples that training may use"
        )
    if upload is None or not upload.is_complete:
        raise Refused("upload-incomplete", "upload the whole update before reporting it")
    if upload.sha256 != work.update_sha256:
        raise ReportRefused("update_sha256 is not that of the uploaded update; report the update that was uploaded")


def check_message(state: RoundState, message: Spoke) -> None:
    """Raise `Refused` for a key that another client has advertised, which would stop the round for all clients."""
    if message.turn is not Phase.ADVERTISE_KEYS:
        return
    exchange, advert = exchange_of(state), _advert(message.word)
    assert exchange is not None, "only a secure round takes messages"
    own = {advert.channel_key, advert.mask_key}
    for other in exchange.who(Phase.ADVERTISE_KEYS):
        theirs = _advert(exchange.said(other, Phase.ADVERTISE_KEYS))
        if own & {theirs.channel_key, theirs.mask_key}:
            raise Refused("malformed-request", "another client of this round has advertised one of these keys")


def require_repeated(state: RoundState, message: Spoke) -> None:
    """Raise `Refused` for a message that does not count, unless it repeats one that counted."""
    exchange = exchange_of(state)
    said = exchange.said(message.client, message.turn) if exchange else ""
    if not said:
        raise Refused(
            "assignment-closed",
            f"the round does not wait for this client's {message.turn.value} now; ask for the assignment's status",
        )
    if said != message.word:
        raise Refused(
            "changed-message",
            f"this client's {message.turn.value} was already received with other content; a client may send one "
            "message per phase",
        )


def exchange_of(state: RoundState) -> Exchange | None:
    return state.exchange if isinstance(state, Training | Closing) else None


def _advert(word: str) -> AdvertiseKeys:
    return AdvertiseKeys.decode(base64.b64decode(word))


def _check_task(task: Task, work: Work) -> None:
    if isinstance(work, WorkDone) and (work.probe is not None) != task.tries_clients:
        raise ReportRefused(
            "this assignment is a canary's: send the measurements in `probe`"
            if task.tries_clients
            else "only a canary's report may have `probe`; leave it out"
        )
    if isinstance(work, WorkDone | MaskedInput) != task.sends_updates:
        raise ReportRefused(
            "this assignment asks to train: send an update and its report, not an evaluation alone"
            if task.sends_updates
            else "this assignment asks to measure the model: send an evaluation, and no update"
        )
