"""Whether a run file's kinds of tensors and its server optimizer fit a model's layout."""

from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.layout import INTEGER_UNIT, SLOTS_PREFIX, Layout
from umbel.aggregation.optimizers.section import AggregationSection
from umbel.aggregation.plans.tensors import KINDS_KEPT, TensorKind, TensorRules
from umbel.aggregation.plans.training import TrainingTerms


def require_fitting(rules: TensorRules | None, layout: Layout, coarsest_step: float) -> None:
    """Raise `LayoutError` if a run with these rules cannot have this layout. `coarsest_step`: of its rounds' grids.

    A layout may state kinds that the rules do not list: the clients' own code declares them (`Client.shares`).
    """
    if rules is not None:
        if rules.patterns.get("base") and not rules.base_sha256:
            raise LayoutError(
                "[tensors] lists base tensors, but the run file has no base_sha256, which binds the run to their "
                "values: write it at the top of the run file. `umbel model init` prints it"
            )
        names = {spec.name for spec in layout.model.tensors}
        if pattern := rules.unmatched(names, "global", "count"):
            raise LayoutError(
                f"the pattern {pattern!r} in [tensors] matches no tensor of the model: correct it, or remove it"
            )
        for spec in layout.model.tensors:
            _require_kind(rules, spec.name, spec.kind)
    if coarsest_step > INTEGER_UNIT and any(spec.kind == "count" for spec in layout.tensors):
        raise LayoutError(
            f"the run's grid has a step of {coarsest_step:g}, too coarse to add up counts exactly (2^-16 at most): "
            "lower max_abs or sample_count_max in [aggregation], or rounds.target"
        )
    if layout.update.n_values == 0:
        raise LayoutError(
            "there is nothing to train: no tensor of the model has a value that clients send. Change [tensors], so "
            "that some tensors have the kind mean"
        )


def require_steppable(section: AggregationSection, training: TrainingTerms, layout: Layout) -> None:
    """Raise `LayoutError` if the server optimizer of these sections cannot move a model with this layout."""
    _require_control(training, layout)
    has_own = training.remembers_drift or training.has_control
    if not (section.remembers or has_own):
        return
    key = f'algorithm = "{training.algorithm}"' if has_own else f'optimizer = "{section.optimizer}"'
    remedy = 'algorithm = "fedavg" in [training]' if has_own else 'optimizer = "sgd" in [aggregation]'
    if found := [spec.name for spec in layout.model.tensors if spec.name.startswith(SLOTS_PREFIX)]:
        raise LayoutError(
            f'tensor {found[0]!r} has a name that begins with "{SLOTS_PREFIX}", but with {key} such names are for what '
            f"the optimizer remembers: rename the tensor, or set {remedy}"
        )
    if not any(spec.is_stepped and spec.n_values for spec in layout.tensors):
        raise LayoutError(
            f"{key} has nothing to move: it moves floats of the kind mean, and running statistics, integers and bools "
            f"take their mean change. Set {remedy}"
        )


def _require_control(training: TrainingTerms, layout: Layout) -> None:
    """Raise `LayoutError` unless there are control variates if, and only if, the algorithm needs them."""
    if layout == (layout.model.with_control if training.has_control else layout.model):
        return
    raise LayoutError(
        'algorithm = "scaffold" needs a control variate for each weight in the model file: create the run with '
        "`umbel run create`, which adds them"
        if training.has_control
        else f"the model file has control variates, which are for algorithm = "
        f'"scaffold", not for "{training.algorithm}": create the run with `umbel run create`, which leaves them out'
    )


def _require_kind(rules: TensorRules, name: str, found: TensorKind) -> None:
    try:
        listed = rules.kind_of(name)
    except ValueError as error:
        raise LayoutError(str(error)) from error
    if listed in KINDS_KEPT:
        raise LayoutError(
            f"tensor {name!r} is {listed} by [tensors], so it must not leave a site, but the model file holds it: "
            "create the run with `umbel run create`, which leaves such tensors out, or make a model file with "
            "`umbel model init --run-file`"
        )
    if listed is not None and listed != found:
        raise LayoutError(
            f"tensor {name!r} has the kind {listed} in [tensors], but the kind {found} in the model file: create the "
            "run with `umbel run create`, which writes the kinds of [tensors] into the file, or make a model file "
            "with `umbel model init --run-file`"
        )
