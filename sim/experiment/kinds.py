"""What of a simulated model travels, where one model in memory does the work of all clients."""

from umbel.aggregation.codec.vector_update import GradientProjections
from umbel.aggregation.errors import LayoutError
from umbel.aggregation.model.kinds import require_fitting, require_steppable
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.tensors import KINDS_KEPT
from umbel.aggregation.run.file import RunFile


def layout_of_run(file: RunFile, model: Layout) -> Layout:
    """The layout of the run's model. `model`: of the module, with the kinds that it has without [tensors].

    Raises `ValueError` for a pattern that matches no tensor, for a run that cannot have this model, and for kinds that
    need a model of its own for each client.
    """
    rules, kinds = file.tensor_rules, {spec.name: spec.kind for spec in model.tensors}
    if rules is not None:
        if pattern := rules.unmatched(kinds):
            raise LayoutError(f"the pattern {pattern!r} in [tensors] matches no tensor of the model: correct it")
        kinds = {name: rules.kind_of(name) or kind for name, kind in kinds.items()}
    if kept := [name for name in kinds if kinds[name] in KINDS_KEPT]:
        raise LayoutError(
            f"tensor {kept[0]!r} is {kinds[kept[0]]} by [tensors], so each client needs a model of its own, but the "
            "engines of [model] train all clients in one model: simulate your own clients instead (`app` in [clients])"
        )
    made = model.with_kinds(kinds.__getitem__)
    made = made.with_control if file.training.has_control else made
    require_fitting(rules, made, file.coarsest_step)
    require_steppable(file.aggregation, file.training, made)
    if made.update is not made and GradientProjections(file.codec.first(made.update.n_values, 0), made):
        raise LayoutError(
            f"{file.codec.name} in the mode structured and global tensors cannot be simulated together with the "
            'engines of [model]: set mode = "sketched" in [codec], or simulate your own clients (`app` in [clients])'
        )
    return made
