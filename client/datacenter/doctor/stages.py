"""Pipeline stages: how to divide a model's layers among ranks, and whether the ranks' own stages are balanced. Pure.

The slowest stage sets the pace of a pipeline, so the mean work of a stage over the most work of one is the most that a
pipeline can use of its ranks. A part of that is lost to the bubble: with the schedules GPipe and 1F1B, P stages and M
micro-batches, each rank waits for (P-1) / (M + P-1) of a step (Narayanan et al. 2021, "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM", section 2.2). Huang et al. 2019, "GPipe", section 2.3, found the
bubble to be small from M = 4 P on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from umbel.aggregation.phrases import counted
from umbel.client.datacenter.doctor.facts import RankFacts, named
from umbel.client.datacenter.doctor.layers import LayerCost
from umbel.client.datacenter.doctor.links import sized
from umbel.client.findings import ClientFinding, passed, warned

_MICRO_BATCHES = 4  # for each stage
BALANCED = 1.25
"""The imbalance up to which stages count as balanced: a fifth of the ranks' time is lost."""
_LARGE_BUBBLE = 0.2
_NAMED_MOST = 8  # stages in a sentence


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage needs in one step."""

    first: str  # layer
    last: str
    work: int  # floating-point operations; bytes of parameters if none were counted
    parameter_bytes: int
    largest: str  # the layer with most work
    largest_work: int


@dataclass(frozen=True, slots=True)
class PipelineStages:
    """The stages of one model, one for each rank, in their order."""

    stages: tuple[StageCost, ...]  # two at least
    n_micro_batches: int  # 4 for each stage, if the batch is large enough
    n_balanced: int | None = None  # with how many stages, at most, the model is balanced; None: none were looked for

    @property
    def imbalance(self) -> float:
        """The most work of one stage, as a multiple of the mean; 1 if no work was counted."""
        return imbalance([one.work for one in self.stages])

    @property
    def slowest(self) -> int:
        """The number of the stage with most work."""
        return max(range(len(self.stages)), key=lambda number: self.stages[number].work)

    @property
    def bubble(self) -> float:
        """The share of a step in which a rank waits, if the stages are balanced."""
        return bubble_share(len(self.stages), self.n_micro_batches)


def imbalance(works: Sequence[int]) -> float:
    """The largest of these, as a multiple of the mean; 1 if all are 0."""
    return max(works) * len(works) / sum(works) if any(works) else 1.0


def bubble_share(n_stages: int, n_micro_batches: int) -> float:
    """The share of a step in which a rank of a GPipe or 1F1B schedule waits. Both from 1."""
    return (n_stages - 1) / (n_micro_batches + n_stages - 1)


def micro_batches(n_stages: int, batch_size: int) -> int:
    """Four for each stage, but no more than the batch has samples."""
    return min(_MICRO_BATCHES * n_stages, batch_size)


def divided(layers: Sequence[LayerCost], n_stages: int, batch_size: int) -> PipelineStages | str:
    """The consecutive stages whose largest work is least; why there are none if there are too few layers.

    `layers`: one at least. `n_stages`: from 2.
    """
    if len(layers) < n_stages:
        return f"the model has only {counted(len(layers), 'layer')} for {n_stages} pipeline stages"
    is_counted = any(one.flops for one in layers)
    works = [one.flops if is_counted else one.parameter_bytes for one in layers]
    found = {n: _stages(layers, works, n) for n in range(1, n_stages + 1)}
    n_balanced = max(n for n, stages in found.items() if imbalance([one.work for one in stages]) <= BALANCED)
    return PipelineStages(found[n_stages], micro_batches(n_stages, batch_size), n_balanced)


def _stages(layers: Sequence[LayerCost], works: Sequence[int], n_stages: int) -> tuple[StageCost, ...]:
    found, begin = list[StageCost](), 0
    for end in least_largest(works, n_stages):
        largest = max(range(begin, end), key=works.__getitem__)
        found.append(
            StageCost(
                first=layers[begin].name,
                last=layers[end - 1].name,
                work=sum(works[begin:end]),
                parameter_bytes=sum(one.parameter_bytes for one in layers[begin:end]),
                largest=layers[largest].name,
                largest_work=works[largest],
            )
        )
        begin = end
    return tuple(found)


def least_largest(works: Sequence[int], n_parts: int) -> list[int]:
    """The ends of `n_parts` consecutive parts, none of them empty, whose largest sum is least.

    `works`: from 0, as many as parts at least. The bound is found by bisection, and each part is filled up to it:
    Pinar and Aykanat 2004, "Fast optimal load balancing algorithms for 1D partitioning", JPDC 64(8), section 3.
    """
    low, high = max(works), sum(works)
    while low < high:
        bound = (low + high) // 2
        if len(_filled(works, bound)) <= n_parts:
            high = bound
        else:
            low = bound + 1
    ends = _filled(works, low)
    # Fewer parts are as good for the largest one. Some part has another element to give, because there are enough.
    missing = n_parts - len(ends)
    spare = [place for place in range(1, len(works)) if place not in ends]
    return sorted([*ends, *spare[len(spare) - missing :]])


def _filled(works: Sequence[int], bound: int) -> list[int]:
    """The ends of parts that are filled up to the bound, one after the other. `bound`: the greatest work at least."""
    ends, total = list[int](), 0
    for place, work in enumerate(works):
        if total + work > bound:
            ends.append(place)
            total = 0
        total += work
    return [*ends, len(works)]


def finding_of_division(stages: PipelineStages | str) -> ClientFinding:
    """How the model could be divided among the ranks."""
    if isinstance(stages, str):
        return warned("stages", stages, "take fewer ranks for one pipeline, or write the model as more layers in a row")
    said = f"{len(stages.stages)} pipeline stages: {_names(stages)}; {_figures(stages)}"
    if stages.imbalance <= BALANCED:
        return _with_bubble(stages, said)
    fewer = "" if (stages.n_balanced or 1) < 2 else f"take {stages.n_balanced} stages, which are balanced, or "
    if (alone := _heavy_layer(stages)) is not None:
        return warned("stages", f"{said}; {alone}", f"{fewer}divide this layer (tensor parallelism)")
    return warned("stages", said, f"{fewer}write the model as more and smaller layers")


def finding_of_stages(stages: PipelineStages, facts: Sequence[RankFacts]) -> ClientFinding:
    """Whether the stages that the ranks have are balanced."""
    works = [one.work for one in stages.stages]
    said = f"the ranks have different tensors, as {len(works)} pipeline stages: {_names(stages)}; {_figures(stages)}"
    if stages.imbalance <= BALANCED:
        return _with_bubble(stages, said)
    said += f"; the slowest stage is that of {named(stages.slowest, facts)}"
    if (alone := _heavy_layer(stages)) is not None:
        return warned("stages", f"{said}; {alone}", "divide this layer (tensor parallelism), or take fewer stages")
    least = named(works.index(min(works)), facts)
    return warned("stages", said, f"move layers from it towards {least}, which has the least work")


def _heavy_layer(stages: PipelineStages) -> str | None:
    """The layer that is too much for a balanced stage by itself; None if there is none."""
    works, slowest = [one.work for one in stages.stages], stages.stages[stages.slowest]
    if slowest.largest_work * len(works) <= BALANCED * sum(works):
        return None
    return f"the layer {slowest.largest} alone has {slowest.largest_work / sum(works):.0%} of the work"


def _with_bubble(stages: PipelineStages, said: str) -> ClientFinding:
    if stages.bubble > _LARGE_BUBBLE:
        enough = _MICRO_BATCHES * len(stages.stages)
        return warned("stages", said, f"set batch_size to {enough} or more, for {enough} micro-batches")
    return passed("stages", said)


def _names(stages: PipelineStages) -> str:
    """The layers of each stage."""
    names = [one.first if one.first == one.last else f"{one.first} to {one.last}" for one in stages.stages]
    return " | ".join(names if len(names) <= _NAMED_MOST else [*names[: _NAMED_MOST - 1], "..."])


def _figures(stages: PipelineStages) -> str:
    largest = max(one.parameter_bytes for one in stages.stages)
    return (
        f"the slowest has {stages.imbalance:.2f} x the mean work, the largest has {sized(largest)} of parameters, and "
        f"with {counted(stages.n_micro_batches, 'micro-batch', 'micro-batches')} of a 1F1B schedule a rank is idle for "
        f"{stages.bubble:.0%} of a step"
    )
