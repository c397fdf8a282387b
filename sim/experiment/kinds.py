"""What of a simulated model travels, where one model in memory does the work of all clients."""

from umbel.aggregation.codec.vector_update import projections
from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.kinds import require_fitting
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.tensors import KINDS_KEPT, TensorKind
from umbel.aggregation.run.file import RunFile


def layout_of_run(file: RunFile, layout: Layout) -> Layout:
    """The layout of the run's model. `layout`: of the model, all of whose tensors have the kind mean.

    Raises `ValueError` for a pattern that matches no tensor, for a run that cannot have this model, and for kinds that
    need a model of its own for each client.
    """
    if (rules := file.tensor_rules) is None:
        return layout
    names = [spec.name for spec in layout.tensors]
    if pattern := rules.unmatched(names):
        raise LayoutError(f"the pattern {pattern!r} in [tensors] matches no tensor of the model: correct it")
    kinds: dict[str, TensorKind] = {name: rules.kind_of(name) or "mean" for name in names}
    if kept := [name for name in names if kinds[name] in KINDS_KEPT]:
        raise LayoutError(
            f"tensor {kept[0]!r} is {kinds[kept[0]]} by [tensors], so each client needs a model of its own, but the "
            "engines of [model] train all clients in one model: simulate your own clients instead (`app` in [clients])"
        )
    made = layout.with_kinds(kinds.__getitem__)
    require_fitting(rules, made, file.coarsest_step)
    if made.update is not made and projections(file.codec.first(made.update.n_values, 0), made):
        raise LayoutError(
            f"{file.codec.name} in the mode structured and global tensors cannot be simulated together with the "
            'engines of [model]: set mode = "sketched" in [codec], or simulate your own clients (`app` in [clients])'
        )
    return made
