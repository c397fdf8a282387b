"""torchft's DiLoCo and umbel's make the same models; this runs where torchft is installed."""

from dataclasses import replace

import pytest

from tests.sim.bench.collective.small_job import LIMIT_S, samples
from tests.sim.bench.collective.test_grid import RARE
from umbel.sim.bench.collective.grid import grid_job
from umbel.sim.bench.collective.links import Loopback
from umbel.sim.bench.collective.ranks import run_ranks
from umbel.sim.bench.collective.torchft_peer import is_installed


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason="torchft is not installed")
def test_means_of_torchft_are_those_of_outer_sync() -> None:
    job = replace(RARE, averagers=("float32", "torchft"))
    for answer in run_ranks(job, samples(), Loopback(), LIMIT_S):
        by_averager = {(one.every, one.averager): one.loss for one in answer.times}
        for every in job.everys:
            assert by_averager[every, "torchft"] == pytest.approx(by_averager[every, "float32"], rel=1e-5)


def test_the_grid_has_it_where_it_is_installed() -> None:
    assert ("torchft" in grid_job(2, quick=True).averagers) == is_installed()
