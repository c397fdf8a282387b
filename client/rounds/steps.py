"""Whether a site has done enough of its work for a masked update, by the steps that its own code reports.

A coordinator can see to it that a site has little time (`aggregation/secagg/numbers/work_floor.py` says why that must
gain it nothing). The ready trainer counts its steps. A `train` of a site's own may miscount them, and what can be known
of that is held against what it says; the rest is that code's to get right.
"""

from umbel.aggregation.secagg.numbers.work_floor import steps_needed
from umbel.client.app import LocalPlan
from umbel.client.errors import TooLittleDone, UnfitWork
from umbel.client.rounds.work import Trained


def check_steps(plan: LocalPlan, done: Trained) -> None:
    """Raise `UnfitWork`, with what to correct, for steps that cannot be: fewer planned than were asked, or all of them
    done by a training that was told to stop.
    """
    result, least = done.result, plan.steps_for(1)  # an epoch has a batch at least
    if not 1 <= result.steps_done <= result.steps_planned:
        raise UnfitWork(
            f"train returned steps_done = {result.steps_done} and steps_planned = {result.steps_planned}: steps_done "
            "must be between 1 and steps_planned"
        )
    if result.steps_planned < least:
        raise UnfitWork(
            f"train returned steps_planned = {result.steps_planned}, and the plan asks for {least} or more: return "
            "plan.steps_for(batches in an epoch), not the steps that were done"
        )
    if done.was_stopped and result.steps_done == result.steps_planned:
        raise UnfitWork(
            f"train was told to stop but reported all {result.steps_planned} planned steps as done: return the steps "
            "actually done as steps_done, and check plan.should_stop() before each step, not after the last"
        )


def check_floor(done: Trained, floor: float) -> None:
    """Raise `TooLittleDone` if less than this share of the planned steps was done for want of time; `UnfitWork` if
    there was time, for then the data may have decided when training ended, and that the coordinator sees.
    """
    result = done.result
    needed = steps_needed(floor, result.steps_planned)
    if result.steps_done >= needed:
        return
    of = f"{result.steps_done} of {result.steps_planned} planned steps"
    if done.could_go_on:
        raise UnfitWork(
            f"train ended after {of}, though it was not told to stop and had time for more, and a masked update needs "
            f"{needed} (minimum_work = {floor:g}): do all steps of the plan, or until plan.should_stop() gives a reason"
        )
    raise TooLittleDone(
        f"only {of} were done in time, and a masked update "
        f"needs {needed} (minimum_work = {floor:g}); with fewer it could stand out in the sum. Ask the operator "
        "for fewer local steps or a longer window_s. Lowering minimum_work, in the run file and in this site's "
        "policy, has the price stated in docs/explanation/limits-of-security.md"
    )
