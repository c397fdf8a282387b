"""The server's step of a closed round, from what the run file says and what the round's reports or masked sum say."""

from umbel.aggregation.model.next_model import ServerStep
from umbel.aggregation.round.states import Closing
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.secagg.numbers.totals import Totals


def server_step(file: RunFile, closing: Closing, totals: Totals | None) -> ServerStep:
    """The step that coordinator and simulator make with the round's mean. `totals`: of a masked sum; None otherwise."""
    plan, terms = closing.plan, file.server_terms(closing.plan.number)
    factor = closing.factor(terms[1]) if totals is None else totals.effective_steps
    total_weight = closing.aggregate.total_weight if totals is None else totals.total_weight
    return ServerStep.of(terms, plan.number, file.rounds.count, plan.target, factor=factor, total_weight=total_weight)
