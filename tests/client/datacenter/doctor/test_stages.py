"""Layers are divided into stages whose largest is least, and imbalance and bubble are said with a remedy."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.client.datacenter.doctor.facts import RankFacts
from umbel.client.datacenter.doctor.layers import LayerCost
from umbel.client.datacenter.doctor.stages import (
    BALANCED,
    PipelineStages,
    StageCost,
    bubble_share,
    divided,
    finding_of_division,
    finding_of_stages,
    least_largest,
    micro_batches,
)

FACTS = [RankFacts(host, {}, "processor", 0, 2) for host in ("north", "south")]
WORKS = st.lists(st.integers(0, 50), min_size=1, max_size=9)


def sums(works: list[int], ends: list[int]) -> list[int]:
    return [sum(works[begin:end]) for begin, end in pairwise([0, *ends])]


@given(WORKS, st.integers(1, 9))
def test_no_other_division_has_a_smaller_largest_part(works: list[int], n_parts: int) -> None:
    n_parts = min(n_parts, len(works))
    ends = least_largest(works, n_parts)
    assert len(ends) == len({*ends}) == n_parts, "no part is empty"
    assert ends == sorted(ends)
    assert ends[-1] == len(works)
    others = combinations(range(1, len(works)), n_parts - 1)
    assert max(sums(works, ends)) == min(max(sums(works, [*one, len(works)])) for one in others)


def test_a_long_chain_is_divided_too() -> None:
    works = [10**12 + i for i in range(1000)]
    assert max(sums(works, least_largest(works, 8))) <= 1.001 * sum(works) / 8


def test_the_bubble_is_that_of_the_literature() -> None:
    assert bubble_share(4, 8) == pytest.approx(3 / 11)
    assert bubble_share(4, 1) == pytest.approx(3 / 4), "without micro-batches one stage works at a time"
    assert bubble_share(1, 8) == 0
    assert [micro_batches(4, batch_size) for batch_size in (64, 8)] == [16, 8]


def layers(*flops: int) -> list[LayerCost]:
    return [LayerCost(f"layers.{number}", one, 1000) for number, one in enumerate(flops)]


def division(*flops: int, n_stages: int, batch_size: int = 64) -> PipelineStages:
    found = divided(layers(*flops), n_stages, batch_size)
    assert isinstance(found, PipelineStages)
    return found


def test_a_model_is_divided_by_its_work_and_the_finding_has_the_figures() -> None:
    found = division(0, 10, 10, 10, 5, 5, n_stages=2)
    assert [(one.first, one.last, one.work, one.parameter_bytes) for one in found.stages] == [
        ("layers.0", "layers.2", 20, 3000),
        ("layers.3", "layers.5", 20, 3000),
    ]
    assert str(finding_of_division(found)) == (
        "stages: pass: 2 pipeline stages: layers.0 to layers.2 | layers.3 to layers.5; the slowest has 1.00 x the mean "
        "work, the largest has 3 KB of parameters, and with 8 micro-batches of a 1F1B schedule a rank is idle for 11% "
        "of a step"
    )


def test_a_model_without_counted_work_is_divided_by_its_parameters() -> None:
    found = division(0, 0, 0, 0, n_stages=2)
    assert [one.work for one in found.stages] == [2000, 2000]


def test_a_layer_that_is_too_much_for_a_stage_is_named_with_the_stages_that_would_be_balanced() -> None:
    found = division(50, 30, 10, 10, n_stages=3)
    assert found.imbalance == pytest.approx(1.5)
    assert found.imbalance > BALANCED
    finding = finding_of_division(found)
    assert finding.verdict == "warning"
    assert finding.found.endswith("; the layer layers.0 alone has 50% of the work")
    assert finding.advice == "take 2 stages, which are balanced, or divide this layer (tensor parallelism)"
    assert finding_of_division(division(98, 1, 1, n_stages=3)).advice == "divide this layer (tensor parallelism)"


def test_few_equal_layers_are_no_layer_s_fault() -> None:
    finding = finding_of_division(division(10, 10, 10, n_stages=2))
    assert finding.verdict == "warning"
    assert finding.advice == "write the model as more and smaller layers"


def test_too_few_layers_and_too_small_batches_have_a_remedy() -> None:
    short = divided(layers(1), 2, 64)
    assert short == "the model has only 1 layer for 2 pipeline stages"
    assert finding_of_division(short).advice.startswith("take fewer ranks")
    small = finding_of_division(division(1, 1, 1, 1, n_stages=4, batch_size=8))
    assert small.verdict == "warning"
    assert "with 8 micro-batches of a 1F1B schedule a rank is idle for 27% of a step" in small.found
    assert small.advice == "set batch_size to 16 or more, for 16 micro-batches"


def test_many_stages_are_not_all_listed() -> None:
    said = finding_of_division(division(*[1] * 12, n_stages=12)).found
    assert said.startswith("12 pipeline stages: layers.0 | layers.1 | ")
    assert "layers.6 | ...; " in said


def own(*works: int, largest: int = 1) -> PipelineStages:
    return PipelineStages(tuple(StageCost("a", "b", one, 10, "a", largest) for one in works), 8)


def test_the_slowest_stage_of_the_ranks_is_named_and_where_its_layers_can_go() -> None:
    assert finding_of_stages(own(11, 10), FACTS).verdict == "pass"
    finding = finding_of_stages(own(10, 30), FACTS)
    assert finding.verdict == "warning"
    assert finding.found.startswith(
        "the ranks have different tensors, as 2 pipeline stages: a to b | a to b; the slowest"
    )
    assert "has 1.50 x the mean work" in finding.found
    assert finding.found.endswith("the slowest stage is that of rank 1 (on south)")
    assert finding.advice == "move layers from it towards rank 0 (on north), which has the least work"
    heavy = finding_of_stages(own(10, 30, largest=28), FACTS)
    assert heavy.found.endswith("; the layer a alone has 70% of the work")
    assert heavy.advice.startswith("divide this layer")


def test_stages_without_any_work_are_balanced() -> None:
    assert own(0, 0).imbalance == 1
