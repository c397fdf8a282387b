"""Whether a client repeats itself: trainings and evaluations of the same weights, also by a client made anew."""

import math
from collections.abc import Iterator
from pathlib import Path

from umbel.aggregation.phrases import some
from umbel.client.check.observed import Evaluating, ObservedTraining
from umbel.client.check.practice_run import PracticeRun
from umbel.client.check.result_checks import check_metrics
from umbel.client.check.trainee import Trainee
from umbel.client.findings import ClientFinding, passed, skipped, warned, wrong
from umbel.client.local.results import Evaluation
from umbel.client.user_code import where_raised

_SEED_ALL = "Draw batch order, dropout and the like from plan.seed, as plan.drive does"


def check_repeats(
    first: Trainee, fresh: Trainee, start: Path, run: PracticeRun, baseline: ObservedTraining
) -> ClientFinding:
    """Train again from the same weights with the same seed: the same object, and one that was made anew."""
    again = first.train(start, run.plain())
    anew = fresh.train(start, run.plain())
    if (failed := again.error or anew.error) is not None:
        return wrong("determinism", f"a second training failed with {where_raised(failed)}", "Correct train")
    is_same, is_same_anew = again.after == baseline.after, anew.after == baseline.after
    if is_same and is_same_anew:
        return passed("determinism", "trainings from the same weights with the same seed give the same weights")
    if is_same_anew:
        found = (
            "a second training of the same client gives other weights than its first one, but a client made anew gives "
            "the same weights"
        )
        advice = "Keep nothing from one training to the next in the client, such as an optimizer: keep it in plan.state"
        return wrong("determinism", found, advice)
    if first.shared.encoding_device.type != "cpu":
        found = "trainings from the same weights with the same seed differ; this may be the rounding of the GPU"
        return warned("determinism", found, _SEED_ALL)
    if is_same:
        found = "a client made anew gives other weights, although it starts from the same weights with the same seed"
        return wrong("determinism", found, "Make the client's data and settings the same at each start")
    return wrong("determinism", "two trainings from the same weights with the same seed differ", _SEED_ALL)


def check_evaluates(
    first: Trainee, restarted: Trainee, start: Path, run: PracticeRun, baseline: ObservedTraining | None, trained: Path
) -> Iterator[ClientFinding]:
    """Evaluate: twice, before a training, and by a client that was made anew.

    `restarted`: a client that has done nothing yet. `trained`: the weights after a training. `baseline`: a training
    that no evaluation came before; None if trainings differ anyway.
    """
    evaluating = first.evaluate(start)
    if evaluating.error is not None:
        found = f"evaluate failed with {where_raised(evaluating.error)}"
        yield wrong("evaluate", found, "Correct evaluate; return an Evaluation, or None without held-out data")
        return
    if evaluating.result is None:
        yield skipped("evaluate", "the client has no held-out data")
        yield skipped("restart", "the client has no held-out data")
        return
    yield check_metrics("evaluate", evaluating.result.metrics)
    yield (finding := _evaluate(first, evaluating, start, run, baseline))
    if finding.verdict == "pass":
        yield _restart(first, restarted, start, run, trained)
    elif finding.verdict == "warning":
        yield skipped("restart", "two evaluations of the same client differ, too")


def _evaluate(
    first: Trainee, evaluating: Evaluating, start: Path, run: PracticeRun, baseline: ObservedTraining | None
) -> ClientFinding:
    before, after = evaluating.before, evaluating.after
    if changed := [name for name in {**before, **after} if before.get(name) != after.get(name)]:
        found = f"evaluate has changed the tensor {changed[0]!r} of the model"
        return wrong("evaluate", found, "Call model.eval() first, and change no weight; torch.no_grad() is not enough")
    result = evaluating.result
    assert result is not None, "checked before"
    if result.sample_count < 1:
        found = f"evaluate returned a sample_count of {result.sample_count}"
        return wrong("evaluate", found, "Return the number of held-out samples, or None instead of an Evaluation")
    if (moving := _moving(result, first.evaluate(start).result)) != []:
        if moving and len(moving) < len(result.metrics):
            found = f"two evaluations of the same weights agree, but for the metrics: {some(moving)}"
            return warned("evaluate", found, "Times may differ. Otherwise draw nothing at random in evaluate")
        which = f" in the metrics: {some(moving)}" if moving else ""
        advice = "Call model.eval() first, and draw nothing at random"
        return wrong("evaluate", f"two evaluations of the same weights differ{which}", advice)
    if baseline is not None and first.train(start, run.plain()).after != baseline.after:
        found = "a training after an evaluation gives other weights than a training without one"
        return wrong("evaluate", found, "Call model.train() at the beginning of train, or restore the mode in evaluate")
    return passed("evaluate", "evaluations repeat, and change neither the model nor the next training")


def _restart(first: Trainee, restarted: Trainee, start: Path, run: PracticeRun, trained: Path) -> ClientFinding:
    first.train(start, run.plain())  # so that `first` has what a training leaves in the client
    private = first.shared.private()
    here, anew = first.evaluate(trained, private), restarted.evaluate(trained, private)
    if anew.error is not None:
        found = f"evaluate failed after a restart with {where_raised(anew.error)}"
        return wrong("restart", found, "Make all that evaluate needs in the constructor of the client")
    if not _same(here.result, anew.result):
        found = "evaluate of a client made anew gives another result for the same weights"
        advice = "Keep what evaluate needs in the model's state dict, or keep the held-out data the same at each start"
        return wrong("restart", found, advice)
    return passed("restart", "evaluate of a client made anew gives the same result for the same weights")


def _same(one: Evaluation | None, other: Evaluation | None) -> bool:
    """Whether they agree, up to the rounding of sums in another order."""
    return one is other if one is None or other is None else _moving(one, other) == []


def _moving(one: Evaluation, other: Evaluation | None) -> list[str] | None:
    """The names of the metrics in which they differ by more than rounding; None if they differ in anything else."""
    if other is None or (one.sample_count, one.counts, one.weights, set(one.metrics)) != (
        other.sample_count,
        other.counts,
        other.weights,
        set(other.metrics),
    ):
        return None
    return [name for name, value in one.metrics.items() if not _is_near(value, other.metrics[name])]


def _is_near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-9) or (math.isnan(a) and math.isnan(b))
