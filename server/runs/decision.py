"""What one step decides about a run: it checks each input, and takes it or refuses it. Pure.

An input is a client's message, an operator's order (`orders.py`), or an event that no request causes.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from umbel.aggregation.algorithms.qfedavg import CHANGE_NORM, START_LOSS
from umbel.aggregation.audit.bundle import SignedReport
from umbel.aggregation.errors import ReportRefused, UpdateRefused
from umbel.aggregation.messages import ReportAnswer, RunStatus
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.reports import EvaluationDone, MaskedInput, Work, WorkDone
from umbel.aggregation.round.machine import advance
from umbel.aggregation.round.retry import is_unheard
from umbel.aggregation.round.states import (
    Abandoned,
    Answer,
    Applied,
    Closing,
    Command,
    Committed,
    Declined,
    Event,
    Gathered,
    Outage,
    Recruiting,
    Reported,
    RoundState,
    Silent,
    Spoiled,
    Spoke,
    Tick,
    Training,
)
from umbel.aggregation.run import endings
from umbel.aggregation.run.endings import Known, Upshot
from umbel.aggregation.run.run_end import KeptVersion, RoundEnd
from umbel.aggregation.secagg.messages import AdvertiseKeys
from umbel.aggregation.secagg.section import SecureAggregationSection
from umbel.aggregation.secagg.turns import Exchange, Phase
from umbel.aggregation.types import AssignmentId, ClientId
from umbel.server.problems import Refused
from umbel.server.runs.bundle_facts import AttemptClients
from umbel.server.runs.orders import Order, Rollback, Situation, obey
from umbel.server.store.stored import Answered, Change, LiveRun, StoredRun, StoredUpload, Traffic


class PastAttempt(Exception):
    """The assignment belongs to an attempt that has ended. The answer to it is stored."""


@dataclass(frozen=True, slots=True)
class ReportInput:
    """A client's report, as an event and as the client signed it."""

    event: Reported
    assignment: AssignmentId
    signed: SignedReport


@dataclass(frozen=True, slots=True)
class DeclineInput:
    """A client will not report, or will not sign the participant list."""

    event: Declined
    assignment: AssignmentId


@dataclass(frozen=True, slots=True)
class MessageInput:
    """A client's message in a secure round, as an event and as it was sent."""

    event: Spoke
    assignment: AssignmentId
    body: bytes


@dataclass(frozen=True, slots=True)
class Happening:
    """An event that no request causes."""

    event: Tick | Gathered | Outage | Silent | Spoiled | None = None  # None: only count an outage, if there was one
    round_id: int | None = None  # the attempt that it is about; None: the newest


@dataclass(frozen=True, slots=True)
class Made:
    """The result of a closed round, and the description of its clients."""

    event: Applied
    upshot: Upshot
    clients: AttemptClients
    round_id: int


RunInput: TypeAlias = ReportInput | DeclineInput | MessageInput | Happening | Made | Order


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from the first inputs of those given. The others are for the next step."""

    before: LiveRun
    inputs: Sequence[RunInput]
    answers: Sequence[ReportAnswer | Exception | None]  # to each input
    change: Change
    commands: Sequence[Command]
    uploads: Mapping[AssignmentId, StoredUpload]
    rolled_back_to: KeptVersion | None = None
    waiting: Recruiting | None = None  # what the round waits for now; it is shown, but not stored

    @property
    def changes_nothing(self) -> bool:
        return self.change.state is self.before.state and self.change.status is None

    @property
    def ended(self) -> Abandoned | Committed | None:
        """The attempt's last state, if this step ended it."""
        state = self.change.state
        return state if state is not self.before.state and isinstance(state, Abandoned | Committed) else None

    @property
    def opened(self) -> Training | None:
        """The round, if this step opened it."""
        state, was = self.change.state, self.before.state
        return state if isinstance(state, Training) and isinstance(was, Recruiting) else None

    @property
    def made(self) -> Made | None:
        """The result that committed the round, if this step did."""
        last = self.inputs[-1] if self.inputs else None
        return last if isinstance(last, Made) and isinstance(self.change.state, Committed) else None

    def end(self, run: StoredRun, state: Abandoned | Committed, known: Known) -> RoundEnd:
        """How the attempt ended, and what comes next."""
        if isinstance(state, Committed):
            assert self.made is not None, "only a result commits a round"
            return endings.finished(run, state.closing, self.made.upshot, known)
        if self.rolled_back_to is not None:
            return endings.rolled_back(run, state, self.rolled_back_to, known)
        return endings.abandoned(run, state, known, by_order=isinstance(self.inputs[-1], Order))


def decide(
    inputs: Sequence[RunInput],
    live: LiveRun,
    uploads: Mapping[AssignmentId, StoredUpload],
    history: Sequence[KeptVersion],
) -> Decision:
    """Decide on inputs in their order, the oldest first, until one ends the attempt.

    `live`: the run as it is stored. `uploads`: those of the reports. `history`: the versions, if `needs_history`.
    """
    deciding, answers = _Deciding(live, uploads, history), list[ReportAnswer | Exception | None]()
    for one in inputs:
        try:
            answers.append(deciding.take(one))
        except (Refused, UpdateRefused, PastAttempt) as refusal:
            answers.append(refusal)
        if deciding.has_ended:
            break
    return deciding.decision(inputs[: len(answers)], answers)


def needs_history(inputs: Sequence[RunInput]) -> bool:
    """Whether the decision needs the run's versions: for rollbacks and for results."""
    return any(isinstance(one, Rollback | Made) for one in inputs)


@dataclass(slots=True)
class _Deciding:
    """The run after the inputs so far."""

    live: LiveRun
    uploads: Mapping[AssignmentId, StoredUpload]
    history: Sequence[KeptVersion]
    state: RoundState = field(init=False)
    status: tuple[RunStatus, str] | None = None
    rolled_back_to: KeptVersion | None = None
    commands: list[Command] = field(default_factory=list[Command])
    answered: list[Answered] = field(default_factory=list[Answered])
    sealed: list[tuple[AssignmentId, bytes]] = field(default_factory=list[tuple[AssignmentId, bytes]])
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self.state = self.live.state

    @property
    def has_ended(self) -> bool:
        return isinstance(self.state, Abandoned | Committed) and type(self.state) is not type(self.live.state)

    @property
    def run_status(self) -> RunStatus:
        return self.status[0] if self.status else self.live.run.status

    def take(self, given: RunInput) -> ReportAnswer | None:
        """Take one input; returns the answer to a report."""
        match given:
            case ReportInput():
                return self._report(given)
            case MessageInput():
                self._message(given)
            case DeclineInput():
                self._require_current(given)
                self._advance(given.event)
            case Happening(event, round_id) | Made(event, round_id=round_id):
                self._happen(event, round_id)
            case _:
                self._obey(given)
        return None

    def _report(self, given: ReportInput) -> ReportAnswer:
        self._require_current(given)
        event, state, upload = given.event, self.state, self.uploads.get(given.assignment)
        section = self.live.run.file.secure_aggregation
        is_fair = self.live.run.file.training.fair_terms is not None
        counts = self._advance(event, lambda: check_report(state, event, upload, section, is_fair=is_fair))
        said = next(one for one in reversed(self.commands) if isinstance(one, Answer) and one.client == event.client)
        answer = ReportAnswer(said.outcome, said.reason)
        if counts:
            self.answered.append(Answered(event.client, given.assignment, answer, event.now, given.signed))
        return answer

    def _message(self, given: MessageInput) -> None:
        self._require_current(given)
        event, state = given.event, self.state
        if not self._advance(event, lambda: check_message(state, event)):
            require_repeated(state, event)
            return
        self.traffic.up[given.assignment] += len(given.body)
        if event.turn is Phase.SHARE_KEYS:
            self.sealed.append((given.assignment, given.body))

    def _happen(self, event: Event | None, round_id: int | None) -> None:
        if round_id not in (None, self.live.round_id):
            return  # another replica has ended this attempt
        if event is None or (isinstance(event, Gathered) and self.run_status is RunStatus.PAUSED):
            return
        self._advance(event)

    def _obey(self, order: Order) -> None:
        obeyed = obey(order, Situation(self.live.run.file, self.run_status, self.state, self.history))
        self.rolled_back_to = obeyed.rolled_back_to
        self.status = obeyed.status or self.status
        if obeyed.event is not None:
            self._advance(obeyed.event)

    def _require_current(self, given: ReportInput | DeclineInput | MessageInput) -> None:
        if self.live.assignment_id(given.event.client) != given.assignment:
            raise PastAttempt

    def _advance(self, event: Event, check: Callable[[], None] = lambda: None) -> bool:
        """Advance the machine. Returns whether a report or message counts; `check` may refuse it before that."""
        counted = False

        def count() -> None:
            nonlocal counted
            check()
            counted = True

        self.state, commands = advance(self.state, event, count)
        self.commands += commands
        return counted

    def decision(self, inputs: Sequence[RunInput], answers: Sequence[ReportAnswer | Exception | None]) -> Decision:
        live, state, waiting = self.live, self.state, None
        if isinstance(state, Recruiting) and isinstance(live.state, Recruiting) and _is_stored(state, live.state):
            waiting, state = state, live.state  # at most what is only shown has changed
        declined = self._declined(inputs)
        change = Change(state, tuple(self.answered), self.status, declined, tuple(self.sealed), self.traffic)
        return Decision(live, inputs, answers, change, self.commands, self.uploads, self.rolled_back_to, waiting)

    def _declined(self, inputs: Sequence[RunInput]) -> tuple[ClientId, ...]:
        """The clients that declined in a step that closed or abandoned the round, before it did.

        The new state has them as missing, with their reason.
        """
        if not isinstance(self.live.state, Training) or not isinstance(self.state, Closing | Abandoned):
            return ()
        named = {one.event.client for one in inputs if isinstance(one, DeclineInput)}
        missing = sorted(self.state.missing.items())
        return tuple(client for client, why in missing if client in named and not is_unheard(why))


def _is_stored(state: Recruiting, stored: Recruiting) -> bool:
    """Whether a recruiting round differs from the stored one only in what is shown."""
    return (state.since, state.is_hurried) == (stored.since, stored.is_hurried)


def check_report(
    state: RoundState,
    report: Reported,
    upload: StoredUpload | None,
    section: SecureAggregationSection | None = None,
    *,
    is_fair: bool = False,
) -> None:
    """Raise `ReportRefused` for a wrong report, and `Refused` for one without a whole update.

    `is_fair`: whether the run's algorithm is q-FedAvg, which needs two metrics of each client.

    `section`: the run file's [secure_aggregation]. Its lengths of counts hold also if it is disabled, as in a plain
    rehearsal of a secure run.
    """
    assert isinstance(state, Training), "only an open round takes reports"
    _check_task(state.plan, report.work)
    is_secure = bool(state.secure)
    if isinstance(report.work, MaskedInput) is not is_secure:
        raise ReportRefused(
            "this is a secure round, and the report is not masked: report a masked update, without counts or metrics"
            if is_secure
            else "this is not a secure round, and the report is masked: report counts and metrics in clear"
        )
    work, count_max = report.work, state.plan.sample_count_max
    samples = {"sample_count": work.sample_count, "evaluation": work.evaluation_sample_count}
    weights = {
        f"the weight of {name!r}": one for name, one in (*work.weights.items(), *work.evaluation_weights.items())
    }
    for name, count in {**samples, **weights}.items():
        if count > count_max:
            raise ReportRefused(
                f"{name}: {count} samples are more than the run's sample_count_max of {count_max}; "
                f"report at most {count_max}, or raise sample_count_max in the next run file"
            )
    if section is not None:
        _check_lengths(section, work)
    if is_fair and state.plan.task.makes_model:
        _check_fair(work)
    if isinstance(work, EvaluationDone):
        return
    if isinstance(work, WorkDone) and work.sample_count > (announced := state.cohort[report.client].sample_count):
        raise ReportRefused(
            f"sample_count {work.sample_count} is more than the {announced} that this client announced when it checked "
            "in; check in with all samples that training may use"
        )
    if upload is None or not upload.is_complete:
        raise Refused("upload-incomplete", "the update is not completely uploaded; upload the rest, then report it")
    if upload.sha256 != work.update_sha256:
        raise ReportRefused("update_sha256 is not the hash of the uploaded update; report the update that was uploaded")


def _check_fair(work: Work) -> None:
    for name in (START_LOSS, CHANGE_NORM):
        value = work.metrics.get(name)
        if value is None or value < 0:
            raise ReportRefused(
                f"the run's algorithm is q-FedAvg, which needs the metric {name} of each training, not negative: "
                "report it, with a client that knows this algorithm"
            )


def _check_lengths(section: SecureAggregationSection, work: Work) -> None:
    try:
        section.require_lengths_of(work.counts, work.evaluation_counts)
    except ValueError as error:
        raise ReportRefused(str(error)) from error


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
            raise Refused(
                "malformed-request",
                "another client of this round has already advertised one of these keys; make new keys",
            )


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


def _check_task(plan: RoundPlan, work: Work) -> None:
    task = plan.task
    if isinstance(work, WorkDone) and (work.probe is not None) != task.tries_clients:
        raise ReportRefused(
            "this is a canary round: the report needs the measurements in `probe`"
            if task.tries_clients
            else "only a report of a canary round may have `probe`; leave it out"
        )
    if isinstance(work, WorkDone | MaskedInput) != plan.has_uploads:
        raise ReportRefused(
            "this assignment asks to train: send an update and its report, not only an evaluation"
            if plan.has_uploads
            else "this assignment asks to measure the model: send an evaluation, not an update"
        )
