"""What a client says of its work in its own log."""

import logging

from umbel.aggregation.plans.assignment import Assignment
from umbel.client.rounds.work import Trained

log = logging.getLogger("umbel.client")


def name_of(offer: Assignment) -> str:
    """The round, for the log, and what kind where it makes no model."""
    return f"round {offer.round}" + ("" if offer.task.makes_model else f" {offer.task.value}")


def warn_if_too_slow(offer: Assignment, done: Trained, late_s: float) -> None:
    """Without this word a site that can never be in time would only hear, round after round, that it should stop."""
    if late_s <= 0:
        return
    help_for_it = (
        f"one step is too long for it: ask for a window_s of at least {2 * (offer.window_s + late_s):.0f}, "
        "or a smaller batch_size"
        if done.result.steps_done <= 1
        else "`train` must ask plan.should_stop() before every step, and return what it has"
    )
    log.warning(
        "round %d: training ended %.1f s after the round's window of %g s, after %d of %d steps, which is too late to"
        " count; %s",
        offer.round,
        late_s,
        offer.window_s,
        done.result.steps_done,
        done.result.steps_planned,
        help_for_it,
    )
