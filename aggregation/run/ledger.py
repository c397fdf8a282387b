"""Makes the records of a round from its state: each client's outcome, in words and numbers. Pure."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from umbel.aggregation.counts import most_reported, sum_of_counts
from umbel.aggregation.phrases import counted, lasting, part_of, some
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.reports import Work, WorkDone
from umbel.aggregation.round.coverage import Roll, gaps, names
from umbel.aggregation.round.silence import cut_s, is_silence
from umbel.aggregation.round.states import Abandoned, Accepted, Closing, Committed, Recruiting, RoundState, Training
from umbel.aggregation.run.derived_metrics import with_derived
from umbel.aggregation.run.quantiles import quantiles
from umbel.aggregation.run.records import ClientRecord, Fate, LiveRound, RoundRecord
from umbel.aggregation.secagg.turns import Phase, is_late
from umbel.aggregation.types import ClientId


@dataclass(slots=True)
class MemberFacts:
    """What the coordinator knows of one client of a cohort beside the round's state."""

    sample_count: int
    is_declined: bool = False
    reported_at: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(frozen=True, slots=True)
class Book:
    """What the coordinator knows of a round beside its state."""

    members: Mapping[ClientId, MemberFacts]  # the cohort
    opened_at: float
    heard_at: Callable[[ClientId], float]  # a client's last request
    keeps_metrics: bool = False  # whether the run file has per_site_metrics


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended; see `RoundRecord`."""

    model_version: int
    model_sha256: str | None
    reason: str
    ended_at: float
    model_bytes: int
    rolled_back_to: int | None = None


def silence_max_s(plan: RoundPlan) -> float:
    """A client that is silent for longer than this when its round ends counts as lost."""
    return max(2.0, plan.window_s / 10)


def live_round(state: RoundState, book: Book, waiting: int, now: float) -> LiveRound | None:
    """The round under way, or None once it has ended."""
    closes_in_s: float | None = None
    clients: tuple[ClientRecord, ...] = ()
    match state:
        case Recruiting():
            why, target = _waits_for(state, waiting, now), state.plan.target
        case Training():
            why, target = _progress(state), state.target
            closes_in_s, clients = max(0.0, state.closes_at - now), _clients(state, book, now)
        case Closing(exchange=exchange):
            why, target = f"{_closing_words(state)}: {state.reason}", state.plan.target
            closes_in_s = max(0.0, exchange.ends_at - now) if exchange else 0.0
            clients = _clients(state, book, state.closed_at)
        case Committed() | Abandoned():
            return None
    plan = state.plan
    return LiveRound(plan.number, plan.attempt, state.phase, why, waiting, target, closes_in_s, clients, plan.task)


def _closing_words(state: Closing) -> str:
    """What a closed round does, for operators; of a secure round also whom it waits for."""
    if state.exchange is None:
        return state.plan.task.closing_words
    if state.is_unmasking:
        return f"waiting for shares that unmask the sum, then {state.plan.task.closing_words}"
    heard = {*state.exchange.who(Phase.CONSISTENCY_CHECK), *state.exchange.refused}
    return f"waiting for {some([client for client in state.accepted if client not in heard])} to sign who is in the sum"


def _waits_for(state: Recruiting, n_waiting: int, now: float) -> str:
    """What a recruiting round waits for, for operators: they also see the names of missing clients."""
    plan, missing = state.plan, f"; missing: {some(state.missing)}" if state.missing else ""
    if state.waits_until is None or n_waiting < plan.minimum:
        return f"{state.why}{missing}"
    return (
        f"waiting for clients: {n_waiting} of {plan.n_wanted} here{missing}; starting with these in at most "
        f"{lasting(state.waits_until - now)}, or at once with: umbel run start {plan.run}"
    )


def client_records(state: Closing | Abandoned, book: Book) -> tuple[ClientRecord, ...]:
    """The record of each client of an attempt that has closed or was abandoned."""
    return _clients(state, book, state.closed_at)


def round_record(
    state: Closing | Abandoned, clients: tuple[ClientRecord, ...], opened_at: float, end: Ending
) -> RoundRecord:
    """The record of an ended attempt. `state`: the last one with the cohort. `clients`: its `client_records`."""
    roll = Roll(state.plan, state.cohort, state.accepted, state.missing)
    samples = roll.samples()
    work = [accepted.work for accepted in state.accepted.values()]
    counts = sum_of_counts(done.counts for done in work)
    evaluation_counts = sum_of_counts(done.evaluation_counts for done in work)
    return RoundRecord(
        run=state.plan.run,
        round=state.plan.number,
        attempt=state.plan.attempt,
        committed=isinstance(state, Closing),
        reason=end.reason,
        model_version=end.model_version,
        model_sha256=end.model_sha256,
        opened_at=opened_at,
        wall_s=max(0.0, end.ended_at - opened_at),
        selected=len(state.cohort),
        reported=len(state.accepted),
        partial=sum(done.is_partial for done in work),
        dropped=len(state.cohort) - len(state.accepted),
        sample_count=sum(done.sample_count for done in work),
        bytes_up=sum(client.bytes_up for client in clients),
        bytes_down=sum(client.bytes_down for client in clients),
        metrics=with_derived(_means((done.metrics, done.sample_count, done.weights) for done in work), counts),
        evaluation=with_derived(
            _means((done.evaluation, done.evaluation_sample_count, done.evaluation_weights) for done in work),
            evaluation_counts,
        ),
        clients=clients,
        samples_selected=samples.selected,
        samples_in=samples.reported,
        samples_left_out=samples.left_out,
        samples_share=samples.share,
        codec=state.plan.codec.words if state.plan.task.sends_updates else "",
        secure=state.plan.is_secure,
        passed_over=state.passed_over.clients,
        samples_passed_over=state.passed_over.samples,
        uncovered=gaps(roll),
        open_s=max(0.0, state.closed_at - opened_at) if state.cohort else 0.0,
        window_s=state.plan.window_s,
        over_selection=state.plan.over_selection,
        tuned=state.plan.tuned,
        model_bytes=end.model_bytes,
        task=state.plan.task,
        rolled_back_to=end.rolled_back_to,
        away_s=state.away_s,
        target=state.plan.target,
        minimum=state.plan.minimum,
        counts=counts,
        evaluation_counts=evaluation_counts,
        proximal_mu=state.plan.mu.proximal_mu if state.plan.mu and state.plan.task.sends_updates else None,
        metric_quantiles=quantiles(
            (client, with_derived(one.work.metrics, one.work.counts)) for client, one in state.accepted.items()
        ),
        evaluation_quantiles=quantiles(
            (client, with_derived(one.work.evaluation, one.work.evaluation_counts))
            for client, one in state.accepted.items()
        ),
    )


def _progress(state: Training) -> str:
    """What an open round waits for: up to its target of reports, or those of all its clients, then coverage."""
    plan = state.plan
    n_asked = sum(member.draws for member in state.cohort.values())
    in_words = f"{part_of(state.n_reported, min(n_asked, state.target), plan.target_unit, 'is', 'are')} in"
    if n_asked < state.target:
        asked = counted(len(state.cohort), "client was", "clients were")
        in_words += f"; only {asked} asked, and the target is {counted(state.target, plan.target_unit)}"
    if state.secure and state.secure.why:
        in_words += f"; {state.secure.why}"
    awaited = [gap for gap in gaps(Roll(plan, state.cohort, state.accepted, state.declined)) if gap.may_close]
    return f"{in_words}; coverage waits for {names(awaited)}" if awaited else in_words


def _means(rows: Iterable[tuple[Mapping[str, float], int, Mapping[str, int]]]) -> dict[str, float]:
    """Each metric's mean over the clients that have it, weighted by their sample counts, or by its own weights. Sums
    are rounded once, so the order of the reports changes no bit.
    """
    measured = [row for row in rows if row[0]]
    products, weights = dict[str, list[float]](), dict[str, int]()
    for name in sorted(most_reported(metrics for metrics, _, _ in measured)):
        with_it = [(metrics[name], own.get(name, n)) for metrics, n, own in measured if name in metrics]
        products[name], weights[name] = [value * weight for value, weight in with_it], sum(n for _, n in with_it)
    return {name: math.fsum(products[name]) / total for name, total in weights.items() if total}


def _clients(state: Training | Closing | Abandoned, book: Book, now: float) -> tuple[ClientRecord, ...]:
    return tuple(_client(state, client, book, now) for client in sorted(state.cohort))


def _client(state: Training | Closing | Abandoned, client: ClientId, book: Book, now: float) -> ClientRecord:
    member = book.members[client]
    accepted = state.accepted.get(client)
    silent_s = max(0.0, now - book.heard_at(client))
    fate, reason = _fate(state, client, member, silent_s)
    work: Work | None = accepted.work if accepted else None
    kept = work if book.keeps_metrics else None
    return ClientRecord(
        client=client,
        fate=fate,
        reason=reason,
        sample_count=work.sample_count if work else member.sample_count,
        steps_done=work.steps_done if work else 0,
        steps_planned=work.steps_planned if work else 0,
        bytes_up=member.bytes_up,
        bytes_down=member.bytes_down,
        report_s=None if member.reported_at is None else max(0.0, member.reported_at - book.opened_at),
        silent_s=silent_s,
        tier=state.cohort[client].tier,
        train_s=work.train_s if isinstance(work, WorkDone) else None,
        upload_bytes_per_s=work.upload_bytes_per_s if isinstance(work, WorkDone) else None,
        metrics=with_derived(kept.metrics, kept.counts) if kept else {},
        evaluation=with_derived(kept.evaluation, kept.evaluation_counts) if kept else {},
    )


def _fate(
    state: Training | Closing | Abandoned, client: ClientId, member: MemberFacts, silent_s: float
) -> tuple[Fate, str]:
    accepted = state.accepted.get(client)
    blamed = state.secure.blamed.get(client) if isinstance(state, Abandoned) else None
    if accepted is not None and blamed is None:
        if not isinstance(state, Abandoned):
            return _accepted(accepted)
        if (why := state.secure.refused.get(client)) is not None:
            return Fate.DECLINED, why
        return Fate.RELEASED, f"the round was abandoned: {state.reason}"
    if isinstance(state, Training):
        if (why := state.declined.get(client)) is not None:
            return Fate.RELEASED if is_late(why) else Fate.DECLINED, why
        unheard = f"; nothing was heard of it for {lasting(silent_s)}" if silent_s > cut_s(state.plan.window_s) else ""
        return Fate.TRAINING, f"has not reported yet{unheard}"
    reason = blamed or state.missing[client]
    if member.is_declined and not is_late(reason):
        return Fate.DECLINED, reason
    if silent_s > silence_max_s(state.plan) or is_silence(reason):
        return Fate.LOST, f"silent for {silent_s:.1f} s when the round ended; {reason}"
    return Fate.RELEASED, reason


def _accepted(accepted: Accepted) -> tuple[Fate, str]:
    work = accepted.work
    if work.is_partial:
        return Fate.PARTIAL, part_of(work.steps_done, work.steps_planned, "step", "counts", "count")
    return Fate.ACCEPTED, "the report counts"
