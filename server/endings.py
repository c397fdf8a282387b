"""How an attempt ends: all that is stored together when a round commits or is abandoned. Pure."""

from dataclasses import replace

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.records import RoundRecord
from umbel.aggregation.report_times import observed
from umbel.aggregation.retry import gives_up, next_attempt
from umbel.aggregation.round import Abandoned, Closing, Recruiting
from umbel.aggregation.tuning import NOTHING_KNOWN, Evidence, next_plan
from umbel.aggregation.types import ModelRef, RoundPlan
from umbel.server.ledger import Book, Ending, round_record
from umbel.server.model_files import ModelFiles
from umbel.server.stored import NewModel, RoundEnd, StoredRun


def committed(
    run: StoredRun, closing: Closing, files: ModelFiles, book: Book, now: float, known: Evidence = NOTHING_KNOWN
) -> RoundEnd:
    """What to store: the new model and the next round; the run is finished if this was its last.

    `known`: what a self-tuning run goes by, beside the attempt that ends here.
    """
    plan, published = closing.plan, files.published
    model = ModelRef(plan.number, published.sha256, published.size_bytes, run.model.layout_digest)
    after = replace(run, model=model, master_sha256=files.master_sha256)
    if run.status is RunStatus.RUNNING and plan.number >= run.file.rounds.count:
        after = replace(after, status=RunStatus.FINISHED, reason=f"all {plan.number} rounds are committed")
    ending = Ending(plan.number, model.sha256, closing.reason, now, run.model.size_bytes)
    record = round_record(closing, book, ending)
    following: Recruiting | None = None
    if after.status is RunStatus.RUNNING:
        following = Recruiting(_plan(after, plan.number + 1, 1, known, record, now), since=now)
    return RoundEnd(
        record=record,
        model=NewModel(model, files.master_sha256, run.model.sha256),
        next_state=following,
        status=after.status,
        reason=after.reason,
    )


def abandoned(run: StoredRun, state: Abandoned, book: Book, now: float, known: Evidence = NOTHING_KNOWN) -> RoundEnd:
    """What to store: the next attempt, or the run's failure if the run file allows no more. `known`: as above."""
    record = round_record(state, book, Ending(run.model.version, None, state.reason, now, run.model.size_bytes))
    if run.status is not RunStatus.RUNNING:
        return RoundEnd(record, None, None, run.status, run.reason)
    if (failure := gives_up(state, run.file.rounds.attempts_max)) is not None:
        return RoundEnd(record, None, None, RunStatus.FAILED, failure)
    plan = _plan(run, state.plan.number, state.plan.attempt + 1, known, record, now)
    return RoundEnd(record, None, next_attempt(state, plan, now), run.status, run.reason)


def _plan(run: StoredRun, number: int, attempt: int, known: Evidence, record: RoundRecord, now: float) -> RoundPlan:
    """The plan of what follows; the attempt that has just ended is the newest that is known."""
    observations = (*known.observations, *observed(record))
    return next_plan(run.file, number, attempt, replace(known, observations=observations), now)
