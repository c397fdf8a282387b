"""How an attempt ends, and what follows in its run: all that a coordinator then stores in one transaction. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from umbel.aggregation.codec.step import RoundShown
from umbel.aggregation.messages import RunStatus
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.assignment import ModelChange, ModelRef
from umbel.aggregation.plans.proximal import LOSS, MuState
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.privacy.section import epsilon_after
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.round.retry import gives_up, needs_a_person, next_attempt, sums_before
from umbel.aggregation.round.states import Abandoned, Closing, Recruiting
from umbel.aggregation.run.canary import CanaryClosed, conclusion, verdicts_on, with_verdicts
from umbel.aggregation.run.derived_metrics import derived_metrics, with_derived
from umbel.aggregation.run.ledger import Ending, round_record
from umbel.aggregation.run.records import EVALUATION, ClientRecord, Judged, RoundRecord, VersionRecord
from umbel.aggregation.run.report_times import observed
from umbel.aggregation.run.run_end import (
    KeptVersion,
    MadeFile,
    Measurement,
    ModelMade,
    NewModel,
    RoundEnd,
    Run,
    SecureTotals,
    versions_after,
)
from umbel.aggregation.run.stopping import StopRule, expired, judge
from umbel.aggregation.run.tuning import NOTHING_KNOWN, TuningFacts, next_plan
from umbel.aggregation.secagg.section import DEFAULT_METRICS
from umbel.aggregation.types import ClientId


@dataclass(frozen=True, slots=True)
class EvaluationClosed:
    """An evaluation has closed: its result is in the reports or, if they were masked, in the sum."""

    totals: SecureTotals | None = None  # of a secure evaluation


Upshot: TypeAlias = ModelMade | CanaryClosed | EvaluationClosed
Numbered: TypeAlias = Callable[[RoundPlan], RoundPlan]


@dataclass(frozen=True, slots=True)
class Known:
    """What an ending depends on beside the attempt itself."""

    clients: tuple[ClientRecord, ...]
    opened_at: float
    now: float
    history: Sequence[KeptVersion] = ()  # the run's versions
    evidence: TuningFacts = NOTHING_KNOWN  # for self-tuning


def finished(run: Run, closing: Closing, made: Upshot, known: Known) -> RoundEnd:
    """The ending of a round that has closed, with what was made from it."""
    match made:
        case CanaryClosed():
            return _tried_out(run, closing, made, known)
        case EvaluationClosed():
            return _evaluated(run, closing, made, known)
        case _:
            return _committed(run, closing, made, known)


def model_after(run: Run, made: Upshot) -> str:
    """The hash of the run's model afterwards."""
    return run.model.sha256 if isinstance(made, CanaryClosed | EvaluationClosed) else made.published.sha256


def _committed(run: Run, closing: Closing, files: ModelMade, known: Known) -> RoundEnd:
    plan, published = closing.plan, files.published
    model = ModelRef(run.model.version + 1, published.sha256, published.size_bytes, run.model.layout_digest)
    reason = closing.reason
    if model.sha256 == run.model.sha256:  # such as by a large q of q-FedAvg, which makes changes small
        reason += "; the model is the same as before, because the updates were too small to change it"
    ending = Ending(model.version, model.sha256, reason, known.now, run.model.size_bytes)
    record = round_record(closing, known.clients, known.opened_at, ending)
    record = _with_totals(record, plan, files.totals) if files.totals else record
    record = replace(record, epsilon=_epsilon(run, plan, plan.n_released + 1))
    record = replace(record, judged=_judged(run, closing, files.totals))
    new = NewModel(
        model,
        files.master_sha256,
        run.model.sha256,
        round=plan.number,
        reason=f"made by round {plan.number}: {reason}",
        sample_count=record.sample_count,
        metrics=record.metrics,
        sum_sha256=files.sum_sha256,
        update_rms=files.update_rms,
        shown=files.shown,
        change=None if files.change is None else _change(run, files.change),
        judged=_value(record, of_evaluation=False),
    )
    measured = _measured(run, record)
    if run.file.evaluation is not None:
        measured = None  # clients that did not train measure it in a round of evaluation
    end = RoundEnd(record, new, None, run.status, run.reason, measured, n_released=plan.n_released + 1)
    shown = _shown(closing, record, files)

    def numbered(following: RoundPlan) -> RoundPlan:
        return run.file.numbered_after(following, plan, shown, files.shown)

    return _go_on(run, end, known, numbered, closing.cohort)


def _shown(closing: Closing, record: RoundRecord, files: ModelMade) -> RoundShown:
    """What the round has shown of its clients' work; an auditor reads the same from its bundle (`audit/chain.py`)."""
    works = [one.work for one in closing.accepted.values()]
    rates = [one.upload_bytes_per_s for one in works if isinstance(one, WorkDone)]
    return RoundShown(
        closing.plan.window_s,
        files.n_values,
        files.update_rms,
        [one.bytes_up for one in record.clients if one.client in closing.accepted],
        [rate for rate in rates if rate is not None],
        record.metrics.get(LOSS),
    )


def _change(run: Run, made: MadeFile) -> ModelChange:
    return ModelChange(run.model.sha256, made.sha256, made.size_bytes)


def _evaluated(run: Run, closing: Closing, made: EvaluationClosed, known: Known) -> RoundEnd:
    ending = Ending(run.model.version, run.model.sha256, closing.reason, known.now, run.model.size_bytes)
    record = round_record(closing, known.clients, known.opened_at, ending)
    record = _with_totals(record, closing.plan, made.totals) if made.totals else record
    record = replace(record, judged=_judged(run, closing, made.totals))
    end = RoundEnd(record, None, None, run.status, run.reason, _measured(run, record))
    return _go_on(run, end, known, _numbered_as(closing.plan))


def _tried_out(run: Run, closing: Closing, trial: CanaryClosed, known: Known) -> RoundEnd:
    """After a canary the run file decides: the first round, the run's end, or a pause until an operator resumes it.

    After a pause there is another canary, with other clients if there are any.
    """
    canary = run.file.canary
    assert canary is not None, "only a file with [canary] has one"
    verdicts = verdicts_on(run, closing, trial)
    passes, words = conclusion(verdicts, closing.plan.minimum)
    ending = Ending(run.model.version, run.model.sha256 if passes else None, words, known.now, run.model.size_bytes)
    record = with_verdicts(round_record(closing, known.clients, known.opened_at, ending), verdicts, passes)
    end = RoundEnd(record, None, None, run.status, run.reason)
    if run.status.is_over:
        return end
    if not passes and canary.on_failure == "stop":
        return replace(end, status=RunStatus.FAILED, reason=f"the canary has failed: {words}")
    if not passes and canary.on_failure == "pause":
        unfit = tuple(verdict.client for verdict in verdicts if not verdict.passes)
        plan = run.file.canary_plan(closing.plan.attempt + 1).numbered_as(closing.plan)
        again = Recruiting(plan, since=known.now, avoid=unfit)
        why = f"the canary has failed: {words}. Resume the run to try other clients, if there are any"
        return replace(end, status=RunStatus.PAUSED, reason=why, next_state=again)
    first = _plan(run, 1, 1, known, record).numbered_as(closing.plan)
    return replace(end, next_state=Recruiting(first, since=known.now))


def rolled_back(run: Run, state: Abandoned, target: KeptVersion, known: Known) -> RoundEnd:
    """An older version becomes the newest, and the round under way gets a new attempt."""
    old = target.record
    model = ModelRef(run.model.version + 1, old.sha256, old.size_bytes, run.model.layout_digest)
    ending = Ending(model.version, None, state.reason, known.now, run.model.size_bytes, old.version)
    record = round_record(state, known.clients, known.opened_at, ending)
    n_released = state.plan.n_released + state.secure.was_revealed
    record = replace(record, epsilon=_epsilon(run, state.plan, n_released))
    master, parent = target.master_sha256, run.model.sha256
    new = NewModel(model, master, parent, rolled_back_to=old.version, reason=state.reason)
    end = RoundEnd(record, new, None, run.status, run.reason)
    plan = replace(state.plan, mu=_mu_of_version(run, known, old.version))
    if plan.task.may_be_left_out:
        return _go_on(run, end, known, _numbered_as(plan))
    end = replace(end, deleted=_deleted(run, _versions(known, end)))
    if (spent := _spent(run, n_released)) is not None:
        return replace(end, status=RunStatus.FINISHED, reason=spent)
    return replace(end, next_state=_again(run, replace(state, plan=plan), record, known))


def _mu_of_version(run: Run, known: Known, version: int) -> MuState | None:
    """The mu of a round that begins with this version's model, as it was before later versions; see `MuRule`."""
    if (rule := run.file.training.mu_rule) is None:
        return None
    records = (one.record for one in known.history)
    return rule.after_versions((one.rolled_back_to, one.metrics.get(LOSS)) for one in records)[version]


def abandoned(run: Run, state: Abandoned, known: Known, *, by_order: bool = False) -> RoundEnd:
    """The next attempt follows, the run's failure if the run file allows no more, or a pause until a person has removed
    the cause. An evaluation is not repeated.

    `by_order`: an operator ended it, so no client is to blame and there is no pause.
    """
    ending = Ending(run.model.version, None, state.reason, known.now, run.model.size_bytes)
    record = round_record(state, known.clients, known.opened_at, ending)
    record = replace(record, epsilon=_epsilon(run, state.plan, state.plan.n_released + state.secure.was_revealed))
    end = RoundEnd(record, None, None, run.status, run.reason)
    if run.status.is_over:
        return end
    if state.plan.task.may_be_left_out:
        return _go_on(run, end, known, _numbered_as(state.plan))
    if (spent := _spent(run, state.plan.n_released + state.secure.was_revealed)) is not None:
        return replace(end, status=RunStatus.FINISHED, reason=spent)
    if by_order:
        again = replace(_again(run, state, record, known), before=sums_before(state))
        return replace(end, next_state=again)
    if (failure := gives_up(state, run.file.rounds.attempts_max)) is not None:
        return replace(end, status=RunStatus.FAILED, reason=failure)
    end = replace(end, next_state=next_attempt(state, _next_try(run, state, known, record), known.now))
    if (why := needs_a_person(state, run.file.rounds.attempts_max)) is not None:
        return replace(end, status=RunStatus.PAUSED, reason=why)
    return end


def _with_totals(record: RoundRecord, plan: RoundPlan, totals: SecureTotals) -> RoundRecord:
    """The record of a secure round: only sums of its clients' work are known."""
    return replace(
        record,
        partial=totals.n_partial,
        sample_count=totals.sample_count,
        metrics=with_derived(totals.metrics, totals.counts),
        evaluation=with_derived(totals.evaluation, totals.evaluation_counts),
        counts=totals.counts,
        evaluation_counts=totals.evaluation_counts,
        not_shown=_not_shown(plan, totals),
    )


def _not_shown(plan: RoundPlan, totals: SecureTotals) -> dict[str, str]:
    """Why metrics and counts are not in the record. It does not say how many clients have them: they could be one."""
    assert plan.secure is not None, "only secure rounds have totals"
    least, found = plan.secure.minimum, {**totals.measured_by, **totals.counted_by}
    why = f"fewer than {least} clients have it, which is the minimum of this round"
    few = {name: why for name, n_clients in found.items() if 0 < n_clients < least}
    means = {f"training.{name}" for name in totals.metrics} | {f"{EVALUATION}{name}" for name in totals.evaluation}
    empty = [name for name, n_clients in totals.measured_by.items() if n_clients >= least and name not in means]
    unknown = dict.fromkeys(_unknown(totals), "no client has it: compare the name in the run file with the sites' code")
    overfull = {f"{what}.*": _OVERFULL.format(_KEYS[what]) for what in totals.overfull}
    nothing = dict.fromkeys(empty, "no client had anything to measure")
    return dict(sorted({**few, **nothing, **unknown, **overfull}.items()))


def _unknown(totals: SecureTotals) -> Iterator[str]:
    """The listed metrics that no client has, where clients have others. Not the names that every run file lists."""
    for prefix in ("training.", EVALUATION):
        found = {name: n for name, n in totals.measured_by.items() if name.startswith(prefix)}
        if any(found.values()):
            yield from (
                name for name, n in found.items() if n == 0 and name.removeprefix(prefix) not in DEFAULT_METRICS
            )


_KEYS = {"training": "metrics", "evaluation": "evaluation"}  # of [secure_aggregation]
_OVERFULL = (
    "clients report more metrics than a masked sum has room for, so some are missing: in the next run file, list those "
    "that matter in `{}` of [secure_aggregation]"
)


def _epsilon(run: Run, plan: RoundPlan, n_released: int) -> float | None:
    """The cost of a private run with this many revealed sums; None for other runs."""
    privacy, noise = run.file.privacy, plan.noise
    return epsilon_after(noise, privacy.delta, n_released) if privacy and noise else None


def _judged(run: Run, closing: Closing, totals: SecureTotals | None) -> Judged | None:
    """The round's value of the metric of early stopping, if this kind of round measures it."""
    rule = run.file.stop
    if rule is None or closing.plan.task not in run.file.judges_in:
        return None
    if totals is not None:
        return _judged_in_sum(rule, totals)
    return rule.measured_by([accepted.work for accepted in closing.accepted.values()])


def _judged_in_sum(rule: StopRule, totals: SecureTotals) -> Judged:
    of_training, of_evaluation = derived_metrics(totals.counts), derived_metrics(totals.evaluation_counts)
    figures = {f"training.{name}": value for name, value in of_training.items()}
    figures |= {f"{EVALUATION}{name}": value for name, value in of_evaluation.items()}
    means = {f"training.{name}": value for name, value in totals.metrics.items()}
    means |= {f"{EVALUATION}{name}": value for name, value in totals.evaluation.items()}
    counted_by = {name: totals.counted_by[name.rpartition(".")[0]] for name in figures}
    return rule.measured_in_sum({**means, **figures}, totals.measured_by, counted_by)


def _value(record: RoundRecord, *, of_evaluation: bool) -> float | None:
    """The value for early stopping: of the model that the round began with, or of the one that it made."""
    judged = record.judged
    return judged.value if judged is not None and judged.is_of_evaluation is of_evaluation else None


def _measured(run: Run, record: RoundRecord) -> Measurement | None:
    """The measurement of the model that the round's clients received."""
    if not record.evaluation:
        return None
    return Measurement(run.model.version, record.evaluation, _value(record, of_evaluation=True))


def _go_on(
    run: Run, end: RoundEnd, known: Known, numbered: Numbered, cohort: Mapping[ClientId, object] | None = None
) -> RoundEnd:
    """After a round that is done comes an evaluation by clients not in `cohort`, the next round, or the end.

    `numbered`: sets how updates are written in the next plan.
    """
    versions, number = _versions(known, end), end.record.round
    end = replace(end, deleted=_deleted(run, versions))
    if run.status.is_over:
        return end
    if (enough := _enough(run, end, versions)) is not None:
        return replace(end, status=RunStatus.FINISHED, reason=enough)
    if cohort is not None and run.file.evaluates_after(number):
        plan = numbered(run.file.evaluation_plan(number))
        # A masked sum shows no client's metrics, and hides more the more clients it has. So nobody is left out.
        excluded = () if plan.is_secure else tuple(sorted(cohort))
        return replace(end, next_state=Recruiting(plan, since=known.now, excluded=excluded))
    if (spent := _spent(run, end.n_released)) is not None and number < run.file.rounds.count:
        return replace(end, status=RunStatus.FINISHED, reason=spent)
    if number >= run.file.rounds.count:
        return replace(end, status=RunStatus.FINISHED, reason=_all_done(number))
    plan = numbered(_plan(run, number + 1, 1, known, end.record))
    return replace(end, next_state=Recruiting(plan, since=known.now))


def _all_done(n_rounds: int) -> str:
    return "the one round is committed" if n_rounds == 1 else f"all {n_rounds} rounds are committed"


def _spent(run: Run, n_released: int) -> str | None:
    """Why a private run ends, in words; None while its budget lasts."""
    privacy, count = run.file.privacy, run.file.rounds.count
    if privacy is None or n_released < count:
        return None
    budget = f"epsilon = {privacy.epsilon:g} at delta = {privacy.delta:g}" if privacy.epsilon else counted(count, "sum")
    return f"the privacy budget of {budget} is spent: {counted(n_released, 'sum was', 'sums were')} revealed"


def _enough(run: Run, end: RoundEnd, versions: Sequence[VersionRecord]) -> str | None:
    """Why the run ends early, in words; None while it continues."""
    rule = run.file.stop
    if rule is None or not end.record.committed:
        return None
    if (reason := judge(rule, versions).reason) is None:
        return None
    how = f" ({end.record.judged.why})" if end.record.judged else ""
    return f"stopped early after round {end.record.round} of {run.file.rounds.count}: {reason}{how}"


def _deleted(run: Run, versions: Sequence[VersionRecord]) -> tuple[int, ...]:
    return expired(versions, run.file.retention.n_versions, run.file.stop) if versions else ()


def _versions(known: Known, end: RoundEnd) -> list[VersionRecord]:
    """The run's versions after this ending; empty if they were not looked up."""
    return [one.record for one in versions_after(known.history, end, known.now)]


def _again(run: Run, state: Abandoned, record: RoundRecord, known: Known) -> Recruiting:
    """The next attempt, without a pause and with no client avoided."""
    return Recruiting(_next_try(run, state, known, record), since=known.now)


def _next_try(run: Run, state: Abandoned, known: Known, record: RoundRecord) -> RoundPlan:
    """The plan of the attempt after this one, at the same round or canary."""
    plan = state.plan
    if plan.task.tries_clients:
        return run.file.canary_plan(plan.attempt + 1).numbered_as(plan)
    following = _plan(run, plan.number, plan.attempt + 1, known, record)
    return following.numbered_as(plan, was_revealed=state.secure.was_revealed)


def _numbered_as(before: RoundPlan) -> Numbered:
    return lambda following: following.numbered_as(before)


def _plan(run: Run, number: int, attempt: int, known: Known, record: RoundRecord) -> RoundPlan:
    """The next plan. Self-tuning also knows the attempt that has just ended."""
    evidence = known.evidence
    if run.file.rounds_of(number).self_tuning:
        evidence = replace(evidence, observations=(*evidence.observations, *observed(record)))
    return next_plan(run.file, number, attempt, evidence, known.now)
