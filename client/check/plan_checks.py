"""Whether a client does what a plan asks while it trains: stop, keep the deadline, and adjust gradients."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from umbel.client.check.observed import ObservedPlan, ObservedTraining, as_asked
from umbel.client.check.practice_run import PracticeRun
from umbel.client.check.trainee import Trainee
from umbel.client.findings import ClientFinding, passed, skipped, warned, wrong
from umbel.client.local.plan import LocalPlan
from umbel.client.user_code import where_raised

STOP_AFTER = 2  # steps
_LATE = 1  # a loop may ask before or after a step
_FAR = 1e12  # s
_ASK = "Use plan.drive, or ask plan.should_stop() before each step but the first, and return when it gives a reason"
KEYS = ("proximal_mu", "clip_norm", "codec")


def told_to_stop(plan: ObservedPlan) -> LocalPlan:
    """A copy of the plan which tells its training to stop after `STOP_AFTER` steps."""
    doings = plan.doings

    def reason() -> str | None:
        asked = plan.told_to_stop()  # which counts the question
        return "the check stops this training" if doings.questions >= STOP_AFTER else asked

    return replace(plan, told_to_stop=reason)


def out_of_time(plan: ObservedPlan) -> LocalPlan:
    """A copy of the plan whose deadline passes after `STOP_AFTER` steps."""
    doings = plan.doings
    return replace(plan, deadline=_FAR, clock=lambda: 2 * _FAR * (max(doings.questions, doings.steps) >= STOP_AFTER))


def check_stops(trainee: Trainee, start: Path, run: PracticeRun) -> Iterator[ClientFinding]:
    """Tell two trainings to end early: one by a reason, one by its deadline."""
    cases = (("stop", told_to_stop, "was told to stop"), ("deadline", out_of_time, "reached its deadline"))
    for check, alter, what in cases:
        if trainee.client.app.trains_in_one_call:
            yield skipped(check, "train is one call: when it must stop, it is ended, and its work is lost")
            continue
        trainee.client.alter = alter
        training = trainee.train(start, run.plain())
        trainee.client.alter = as_asked
        yield _ended(check, what, training)


def _ended(check: str, what: str, training: ObservedTraining) -> ClientFinding:
    if training.error is not None:
        return wrong(check, f"train {what} and failed with {where_raised(training.error)}", _ASK)
    result = training.result
    assert result is not None, "no error, so a result"
    done, planned = result.steps_done, result.steps_planned
    if done >= planned:
        asked = "" if training.doings.questions else ", and never asked whether to stop"
        return wrong(check, f"train {what} after {STOP_AFTER} steps, but did all {planned} steps{asked}", _ASK)
    if not 1 <= done <= STOP_AFTER + _LATE:
        return wrong(check, f"train {what} after {STOP_AFTER} steps, but did {done} of {planned}", _ASK)
    if planned != training.plan.steps_for(1):
        found = f"train {what} and says that {planned} steps were planned, not {training.plan.steps_for(1)}"
        return wrong(check, found, "Return plan.steps_for(batches in an epoch) as steps_planned, not the steps done")
    if training.doings.steps > done:
        found = f"train {what} and says that it did {done} steps, but its optimizer took {training.doings.steps}"
        return wrong(check, found, "Return the steps that were done")
    return passed(check, f"train {what} after {STOP_AFTER} steps, and returned {done} of {planned} steps")


# --- what is done to gradients ----------------------------------------------------------------------------------------


def check_gradients(
    trainee: Trainee, start: Path, run: PracticeRun, baseline: ObservedTraining
) -> Iterator[ClientFinding]:
    """Whether FedProx, the clip and a structured codec reach the weights."""
    for key in KEYS:
        if trainee.client.app.trains_in_one_call:
            yield skipped(key, "train is one call, whose gradients nobody can adjust")
            continue
        plan = run.strong(key, trainee.shared.layout)
        if plan is None:
            yield skipped(key, f"the run asks for no {_WHAT[key]}")
        else:
            yield _applied(key, trainee.train(start, plan), baseline, is_own=run.is_own)


_WHAT = {"proximal_mu": "FedProx", "clip_norm": "clip of gradients", "codec": "structured codec"}
_ADJUST = "Call plan.adjust_gradients(model) after backward and before each step of the optimizer"


def _applied(key: str, training: ObservedTraining, baseline: ObservedTraining, *, is_own: bool) -> ClientFinding:
    what = _WHAT[key]
    if training.error is not None:
        return wrong(key, f"with {what}, train failed with {where_raised(training.error)}", _ADJUST)
    if training.refusal:
        if not (training.has_gradients or is_own):
            found = f"train has no gradients, and does not apply {what}: runs that ask for {key} are declined"
            return warned(key, found, "Take part only in runs without it")
        return wrong(key, f"train does not apply {what}, so the client declines runs that ask for {key}", _ADJUST)
    if training.after == baseline.after:
        found = f"train says that {what} is applied, but the weights are the same with a strong {key} as without it"
        return wrong(key, found, _ADJUST)
    return passed(key, f"{what} changes what train does")
