"""The facts in audit bundles: about a run's creation and about each attempt's end. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from umbel.aggregation.audit.bundle import (
    ExactSum,
    KeptUpdates,
    ModelId,
    Participant,
    RoundEnded,
    RunCreated,
    SignedReport,
    json_sha256,
)
from umbel.aggregation.canonical import CanonicalText, canonical, parsed
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.round.states import Abandoned, Closing, Committed
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.ledger import Book, client_records
from umbel.aggregation.run.records import ClientRecord
from umbel.aggregation.run.run_end import RoundEnd
from umbel.aggregation.trust.public_keys import public_key_text
from umbel.aggregation.types import ClientId
from umbel.server.store.stored import ClientEvidence, LiveRun

_MASKED = "masked, and deleted as soon as they were added up: of a secure round there is only the sum"


@dataclass(frozen=True, slots=True)
class Retention:
    """Which updates are deleted when an attempt ends."""

    keeps: bool  # whether this attempt's accepted updates are kept for a replay
    expired_round: int | None  # those of rounds up to this one are deleted now; None: of no earlier round
    reason: str  # for the audit bundle


@dataclass(frozen=True, slots=True)
class AttemptClients:
    """What the record and the audit bundle say about each client of an attempt.

    Its size grows with the cohort, so for a round that commits it is made before the transaction.
    """

    opened_at: float
    records: tuple[ClientRecord, ...]
    participants: CanonicalText[Participant]
    evidence: Mapping[ClientId, ClientEvidence]  # from which `participants` was made


def attempt_clients(
    state: Closing | Abandoned, book: Book, evidence: Mapping[ClientId, ClientEvidence]
) -> AttemptClients:
    """Describe the clients of a round that has closed or was abandoned."""
    records = client_records(state, book)
    return AttemptClients(book.opened_at, records, _participants(records, state, evidence), evidence)


def run_created(file: RunFile, model: ModelRef, master_sha256: str, layout: str, now: float) -> RunCreated:
    """The facts of a run's creation."""
    whole = parsed(canonical(file))
    assert isinstance(whole, dict), "a run file is an object"
    return RunCreated(now, whole, json_sha256(file), ModelId(0, model.sha256, master_sha256), layout)


def round_ended(
    live: LiveRun, end: RoundEnd, run_file_sha256: str, clients: AttemptClients, updates: KeptUpdates
) -> RoundEnded:
    """The facts about an attempt's end. `live`: the run with the model that the attempt began with, in its last state.

    `run_file_sha256`: as in the run's first bundle. `updates`: the updates that this end deletes.
    """
    state, run, record = _ended_state(live), live.run, end.record
    plan, signed = state.plan, clients.participants
    if plan.task.tries_clients:  # its end adds the verdicts to the records
        signed = _participants(record.clients, state, clients.evidence)
    return RoundEnded(
        round=plan.number,
        attempt=plan.attempt,
        committed=record.committed,
        reason=record.reason,
        run_status=end.status.value,
        run_reason=end.reason,
        run_file_sha256=run_file_sha256,
        layout_digest=run.model.layout_digest,
        model_in=ModelId(run.model.version, run.model.sha256, run.master_sha256),
        model_out=_made(end),
        rolled_back_to=record.rolled_back_to,
        plan=plan,
        grid=plan.grid,
        training=run.file.training_of(plan),
        server_learning_rate=run.file.aggregation.rate(plan.number, run.file.rounds.count, plan.target),
        clients=signed,
        sum=_sum(state, end),
        passed_over=record.passed_over,
        samples_passed_over=record.samples_passed_over,
        uncovered=record.uncovered,
        metrics=record.metrics,
        evaluation=record.evaluation,
        opened_at=record.opened_at,
        closed_at=state.closed_at,
        ended_at=record.opened_at + record.wall_s,
        updates=updates,
        counts=record.counts,
        evaluation_counts=record.evaluation_counts,
    )


def retention_of(live: LiveRun, end: RoundEnd) -> Retention:
    """Which updates of this attempt and of earlier ones are kept, by the run file."""
    policy, is_model = live.run.file.retention, end.record.committed and end.record.task.makes_model
    keeps = is_model and policy.n_update_rounds != 0
    expired_round = end.record.round - policy.n_update_rounds if is_model and policy.n_update_rounds else None
    return Retention(keeps, expired_round, _MASKED if live.plan.is_secure else _why(keeps, is_model, policy.updates))


def _why(keeps: bool, is_model: bool, policy: str) -> str:
    if keeps:
        return f'kept for a replay: the run file says retention.updates = "{policy}"'
    if is_model:
        return f'deleted when the round had ended: the run file says retention.updates = "{policy}"'
    return "deleted when the attempt had ended: it made no model of them"


def _ended_state(live: LiveRun) -> Closing | Abandoned:
    state = live.state.closing if isinstance(live.state, Committed) else live.state
    assert isinstance(state, Closing | Abandoned), "the attempt has ended"
    return state


def _made(end: RoundEnd) -> ModelId | None:
    new = end.model
    return None if new is None else ModelId(new.ref.version, new.ref.sha256, new.master_sha256)


def _sum(state: Closing | Abandoned, end: RoundEnd) -> ExactSum | None:
    if isinstance(state, Abandoned) or not state.plan.task.makes_model:
        return None
    new = end.model
    assert new is not None, "a committed round of training has made a model"
    assert new.sum_sha256 is not None, "of a sum"
    return ExactSum(new.sum_sha256, state.aggregate.total_weight, len(state.accepted), new.update_rms, new.shown)


def _participants(
    clients: Sequence[ClientRecord], state: Closing | Abandoned, evidence: Mapping[ClientId, ClientEvidence]
) -> CanonicalText[Participant]:
    return CanonicalText(_participant(one, state, evidence[ClientId(one.client)]) for one in clients)


def _participant(one: ClientRecord, state: Closing | Abandoned, evidence: ClientEvidence) -> Participant:
    client = ClientId(one.client)
    member, accepted = state.cohort[client], state.accepted.get(client)
    report = evidence.report
    if accepted is not None and report is None:  # it came before coordinators kept signatures
        report = SignedReport(canonical(accepted.work))
    return Participant(
        client=one.client,
        key=public_key_text(evidence.public_key),
        draws=member.draws,
        announced=member.sample_count,
        tier=member.tier,
        fate=one.fate,
        reason=one.reason,
        weight=None if accepted is None else accepted.weight,
        report=None if accepted is None else report,
        report_s=one.report_s,
        silent_s=one.silent_s,
        bytes_up=one.bytes_up,
        bytes_down=one.bytes_down,
    )
