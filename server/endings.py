"""How an attempt ends: all that is stored together when a round commits or is abandoned. Pure."""

from dataclasses import replace

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.retry import gives_up, next_attempt
from umbel.aggregation.round import Abandoned, Closing, Recruiting
from umbel.aggregation.types import ModelRef
from umbel.server.ledger import Book, Ending, round_record
from umbel.server.model_files import ModelFiles
from umbel.server.stored import NewModel, RoundEnd, StoredRun


def committed(run: StoredRun, closing: Closing, files: ModelFiles, book: Book, now: float) -> RoundEnd:
    """What to store: the new model and the next round; the run is finished if this was its last."""
    plan, published = closing.plan, files.published
    model = ModelRef(plan.number, published.sha256, published.size_bytes, run.model.layout_digest)
    after = replace(run, model=model, master_sha256=files.master_sha256)
    if run.status is RunStatus.RUNNING and plan.number >= run.file.rounds.count:
        after = replace(after, status=RunStatus.FINISHED, reason=f"all {plan.number} rounds are committed")
    return RoundEnd(
        record=round_record(
            closing, book, Ending(plan.number, model.sha256, closing.reason, now, run.model.size_bytes)
        ),
        model=NewModel(model, files.master_sha256, run.model.sha256),
        next_state=_first_attempt(after, plan.number + 1, now),
        status=after.status,
        reason=after.reason,
    )


def abandoned(run: StoredRun, state: Abandoned, book: Book, now: float) -> RoundEnd:
    """What to store: the next attempt, or the run's failure if the run file allows no more."""
    record = round_record(state, book, Ending(run.model.version, None, state.reason, now, run.model.size_bytes))
    if run.status is not RunStatus.RUNNING:
        return RoundEnd(record, None, None, run.status, run.reason)
    if (failure := gives_up(state, run.file.rounds.attempts_max)) is not None:
        return RoundEnd(record, None, None, RunStatus.FAILED, failure)
    plan = run.file.round_plan(state.plan.number, state.plan.attempt + 1)
    return RoundEnd(record, None, next_attempt(state, plan, now), run.status, run.reason)


def _first_attempt(run: StoredRun, number: int, now: float) -> Recruiting | None:
    if run.status is not RunStatus.RUNNING:
        return None
    return Recruiting(run.file.round_plan(number, 1), since=now)
