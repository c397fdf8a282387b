"""What averaging the running statistics of normalization layers does to a model, in words for people.

By default their kind is mean: they are averaged exactly, weighted by samples, as all other tensors are. The mean of the
variances is not the variance of all data, and where sites' inputs differ it describes no site. Li et al. 2021 ("FedBN:
Federated Learning on Non-IID Features via Local Batch Normalization") keep the whole layer at each site instead.
"""

from umbel.aggregation.model.layout import STATISTICS, Layout
from umbel.aggregation.plans.tensors import TensorRules

_REMEDY = (
    'keep whole layers at the sites, such as with private = ["bn*"] in [tensors], or build the model with GroupNorm '
    "instead of BatchNorm"
)


def careful_of_statistics(layout: Layout, rules: TensorRules | None) -> str:
    """A warning of averaged running statistics that do harm, or can; empty without one.

    `layout`: of a run's model. `rules`: the run file's.
    """
    averaged = [spec.name for spec in layout.tensors if spec.kind == "mean" and _part(spec.name) in STATISTICS]
    if not averaged:
        return ""
    beside = [name for name in averaged if rules is not None and _has_private_weights(name, rules)]
    if beside:
        return (
            f"the running statistics {_some(beside)} are averaged, but the weights of their layers are private. A "
            f"site's weights were trained with its own statistics, so they do not fit the mean: {_REMEDY}"
        )
    return (
        f"the running statistics {_some(averaged)} are averaged over clients. Where the sites' inputs differ "
        f"(scanners, devices, populations), the mean fits none of them: {_REMEDY}"
    )


def _part(name: str) -> str:
    return name.rpartition(".")[2]


def _has_private_weights(name: str, rules: TensorRules) -> bool:
    layer = name.removesuffix(_part(name))
    return any(rules.kind_of(layer + part) == "private" for part in ("weight", "bias"))


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
