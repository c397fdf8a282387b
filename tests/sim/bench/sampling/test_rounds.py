"""The weights of clients in rounds with devices, which the coordinator's own code makes."""

from dataclasses import replace

import numpy as np
import pytest

from umbel.aggregation.plans.round import Weighting
from umbel.sim.bench.sampling.rounds import CIRCUMSTANCES, Circumstances, weights_in_rounds
from umbel.sim.fleet.section import DropoutsSection

SIZES = np.array([10, 20, 30, 40, 900])
LOST, FASTEST, LOST_AT_WORK = CIRCUMSTANCES
FAITHFUL = Circumstances("all report", 1.0, DropoutsSection())
BOTH = pytest.mark.parametrize("weighting", list(Weighting))


def test_uniform_clients_that_all_report_weigh_what_they_hold() -> None:
    weights = weights_in_rounds(Weighting.SAMPLES, SIZES, 2, FAITHFUL, 5, 1)
    assert weights.shape == (5, 5)
    for row in weights:
        (drawn,) = np.nonzero(row)
        assert len(drawn) == 2
        assert row[drawn] == pytest.approx(SIZES[drawn] / SIZES[drawn].sum(), abs=1e-5)


def test_proportional_clients_weigh_as_often_as_they_were_drawn() -> None:
    weights = weights_in_rounds(Weighting.PROPORTIONAL, SIZES, 4, FAITHFUL, 20, 1)
    assert 4 * weights == pytest.approx(np.rint(4 * weights), abs=1e-4)
    assert weights[:, 4].mean() > 0.7


@BOTH
def test_losses_leave_fewer_clients_and_weights_that_sum_to_one(weighting: Weighting) -> None:
    lost = replace(LOST, dropouts=replace(LOST.dropouts, per_round=0.6))
    weights = weights_in_rounds(weighting, np.full(12, 30), 6, lost, 20, 1)
    assert weights.sum(1) == pytest.approx(np.ones(20), abs=1e-4)
    assert (weights > 1e-6).sum(1).mean() < 4


@pytest.mark.parametrize(
    ("weighting", "circumstances"),
    [(Weighting.SAMPLES, FASTEST), (Weighting.SAMPLES, LOST_AT_WORK), (Weighting.PROPORTIONAL, LOST_AT_WORK)],
    ids=["uniform, late", "uniform, lost", "proportional, lost"],
)
def test_the_client_with_most_data_counts_too_little(weighting: Weighting, circumstances: Circumstances) -> None:
    harsh = replace(circumstances, dropouts=replace(circumstances.dropouts, per_hour=100.0))
    weights = weights_in_rounds(weighting, SIZES, 4, harsh, 40, 1)
    assert weights[:, 4].mean() < 0.6 < SIZES[4] / SIZES.sum()


def test_a_proportional_round_waits_for_the_client_with_most_draws_however_late_it_is() -> None:
    """The target counts draws, and without its draws there are too few."""
    weights = weights_in_rounds(Weighting.PROPORTIONAL, SIZES, 4, FASTEST, 40, 1)
    assert weights[:, 4].mean() > 0.8
