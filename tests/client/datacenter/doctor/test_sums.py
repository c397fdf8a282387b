"""Sums by our own algorithms are sums, in real groups; predicted and measured times stand side by side."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.aggregation.collective.ranks import in_ranks
from tests.suite.nights import at_night
from umbel.aggregation.collective.cost_models import COST_MODELS, Link, parameter_server
from umbel.client.datacenter.doctor.algorithms import ALGORITHMS
from umbel.client.datacenter.doctor.links import Network, PairLink
from umbel.client.datacenter.doctor.sums import SumTime, SumTimes, findings_of, length_to_try, measured_sums
from umbel.client.datacenter.ranks.group import Group

HERE = "tests.client.datacenter.doctor.test_sums"
LENGTHS = (1, 2, 7, 1000)


def vector(rank: int, n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float32) * (rank + 1) + rank


def summed(group: dist.ProcessGroup) -> dict[str, Tensor]:
    found = dict[str, Tensor]()
    for name, algorithm in ALGORITHMS.items():
        for n in LENGTHS:
            values = vector(dist.get_rank(group), n)
            algorithm(values, group)
            found[f"{name} {n}"] = values
    n_ranks = dist.get_world_size(group)
    mine = Group(dist.get_rank(group), n_ranks, torch.device("cpu"), group)
    network = Network({}, Link(1e-3, 1e8), (PairLink((0, 1), Link(1e-3, 1e8), True),))
    times = measured_sums(mine, network, ["h"] * n_ranks, 40_000)
    assert times is not None
    assert times.n_bytes == 40_000
    found["measured"] = torch.tensor([one.measured_s or 0.0 for one in times.times])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [3, *at_night(2, 4, 5)])
def test_each_algorithm_makes_the_sum_on_every_rank(n_ranks: int, tmp_path: Path) -> None:
    by_rank = in_ranks(f"{HERE}:summed", n_ranks, tmp_path)
    for one in by_rank:
        for n in LENGTHS:
            whole = sum((vector(rank, n) for rank in range(n_ranks)), torch.zeros(n))
            for name in ALGORITHMS:
                torch.testing.assert_close(one[f"{name} {n}"], whole)
        assert torch.equal(one["measured"], by_rank[0]["measured"])
        assert int((one["measured"] > 0).sum()) == 1 + len(ALGORITHMS)


def test_a_sum_that_would_take_minutes_is_tried_with_fewer_bytes() -> None:
    link = Link(1e-3, 1e8)
    assert length_to_try(40_000, 4, link) == 40_000
    assert parameter_server(length_to_try(4 << 30, 4, link), 4, link) == pytest.approx(3.0, rel=0.01)
    assert length_to_try(2, 4, link) == 16  # a value for each rank


def test_every_algorithm_has_a_cost_model() -> None:
    assert ALGORITHMS.keys() <= COST_MODELS.keys()


def test_predicted_and_measured_stand_side_by_side() -> None:
    times = SumTimes(4 << 20, (SumTime("ring", 0.1, 0.2, 0.15), SumTime("recursive doubling", 0.3, 0.4)))
    assert [one.found for one in findings_of(times)] == [
        "4.19 MB by ring: predicted 100 ms (fitted 200 ms), measured 150 ms, 1.50 x",
        "4.19 MB, predicted only: recursive doubling 300 ms",
    ]
