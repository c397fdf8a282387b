"""How an attempt ends: all that is stored together when a round commits or is abandoned. Pure."""

from collections.abc import Iterable
from dataclasses import replace

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.round import Abandoned, Closing, Recruiting
from umbel.aggregation.types import ModelRef
from umbel.server.ledger import Book, Ending, round_record
from umbel.server.model_files import ModelFiles
from umbel.server.stored import Answered, NewModel, RoundEnd, StoredRun


def committed(
    run: StoredRun, closing: Closing, files: ModelFiles, book: Book, now: float
) -> tuple[StoredRun, RoundEnd]:
    """The run with its new model, finished if this was its last round; and what to store."""
    plan, published = closing.plan, files.published
    model = ModelRef(plan.number, published.sha256, published.size_bytes, run.model.layout_digest)
    after = replace(run, model=model, master_sha256=files.master_sha256)
    if run.status is RunStatus.RUNNING and plan.number >= run.file.rounds.count:
        after = replace(after, status=RunStatus.FINISHED, reason=f"all {plan.number} rounds are committed")
    end = RoundEnd(
        record=round_record(closing, book, Ending(plan.number, model.sha256, closing.reason, now)),
        model=NewModel(model, files.master_sha256, run.model.sha256),
        next_state=_next(after, plan.number + 1, 1, now),
        status=after.status,
        reason=after.reason,
    )
    return after, end


def abandoned(run: StoredRun, state: Abandoned, answered: Iterable[Answered], book: Book, now: float) -> RoundEnd:
    """What to store; the run stays as it is. `answered`: the report that ended the attempt, if one did."""
    return RoundEnd(
        record=round_record(state, book, Ending(run.model.version, None, state.reason, now)),
        model=None,
        next_state=_next(run, state.plan.number, state.plan.attempt + 1, now),
        status=run.status,
        reason=run.reason,
        answered=tuple(answered),
    )


def _next(run: StoredRun, number: int, attempt: int, now: float) -> Recruiting | None:
    if run.status is not RunStatus.RUNNING:
        return None
    return Recruiting(run.file.round_plan(number, attempt), since=now)
