"""The names of metrics that umbel itself sets in a report. A site's own metric of such a name would be lost."""

from collections.abc import Iterable

from umbel.aggregation.algorithms.qfedavg import CHANGE_NORM, START_LOSS
from umbel.aggregation.plans.training import GAMMA, PERSONAL
from umbel.aggregation.run.derived_metrics import derived_names
from umbel.client.errors import TrainingFailed
from umbel.client.local.plan import LocalPlan
from umbel.client.local.results import Evaluation, TrainResult


def require_free_names(plan: LocalPlan, result: TrainResult) -> None:
    """Raise `TrainingFailed` for a metric of the training that has a name which umbel sets under this plan."""
    if plan.inexactness:
        _require_free("train", result, [GAMMA], "the run measures it itself (inexactness in [training])")
    if plan.weighs_by_loss:
        why = 'the run measures it itself (algorithm = "qfedavg" in [training])'
        _require_free("train", result, [START_LOSS, CHANGE_NORM], why)
    require_no_figures("train", result)


def require_no_personal(before: Evaluation, after: Evaluation) -> None:
    """Raise `TrainingFailed` for metrics `before` the training that have the names of those of the model `after` it."""
    names = [f"{PERSONAL}{name}" for name in _names(after)]
    why = "this is the run's name for what the site's own model reaches (evaluate_after in [training])"
    _require_free("evaluate", before, names, why)


def require_no_figures(function: str, found: TrainResult | Evaluation) -> None:
    """Raise `TrainingFailed` for a metric that has the name of a figure which follows from counts beside it."""
    for name, numbers in found.counts.items():
        figures = derived_names({name: len(numbers)})
        _require_free(function, found, figures, f"umbel computes it from the counts {name!r}")


def _require_free(function: str, found: TrainResult | Evaluation, taken: Iterable[str], why: str) -> None:
    if used := sorted(_names(found) & set(taken)):
        raise TrainingFailed(
            f"{function} returned a metric named {used[0]!r}, but {why}. The site's own value would be lost: give it "
            "another name"
        )


def _names(found: TrainResult | Evaluation) -> set[str]:
    return {*found.metrics, *found.counts, *found.weights}
