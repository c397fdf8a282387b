"""Stragglers: so many of each cohort as the file says, who do the share of the work that it says, or send nothing."""

from pathlib import Path

import numpy as np

from umbel.sim.fleet.build import build_fleet
from umbel.sim.fleet.fates import CohortAsk, Fates
from umbel.sim.fleet.section import FleetSection, NetworkSection, SpeedSection, StragglersSection

STEPS, WINDOW_S = 200, 600.0
SPEED, NETWORK = SpeedSection(step_s=0.001), NetworkSection(1e9, 1e9, 0.0, 0.0)


def fates_of(section: FleetSection, n: int = 10, number: int = 1, steps: int = STEPS) -> Fates:
    ask = CohortAsk(np.full(n, steps), 10, np.array([4000]), np.array([4000]), WINDOW_S)
    return build_fleet(section, 7, Path()).fates(np.arange(n), number, 1, 0.0, ask)


def stragglers(share: float, least: float = 0.05, most: float = 0.95, *, partial_work: bool = True) -> FleetSection:
    return FleetSection(
        speed=SPEED, network=NETWORK, stragglers=StragglersSection(share, (least, most)), partial_work=partial_work
    )


def test_of_every_cohort_as_many_are_stragglers_as_the_share_says_and_others_each_time() -> None:
    for share, n_stragglers in ((0.0, 0), (0.5, 5), (0.9, 9), (0.84, 8), (1.0, 10)):
        for number in range(1, 21):
            assert (fates_of(stragglers(share), number=number).steps_done < STEPS).sum() == n_stragglers
    drawn = {tuple(fates_of(stragglers(0.5), number=number).steps_done < STEPS) for number in range(1, 21)}
    assert len(drawn) > 10


def test_a_straggler_does_a_share_of_its_steps_between_the_two_and_reports_in_time() -> None:
    fates = fates_of(stragglers(1.0, 0.25, 0.75), n=2000)
    shares = fates.steps_done / STEPS
    assert (shares.min(), shares.max()) == (0.25, 0.745)
    assert abs(shares.mean() - 0.5) < 0.02
    assert (fates.report_s < WINDOW_S).all()
    assert (fates.report_s > WINDOW_S / 2).all()


def test_a_straggler_does_one_step_at_least_and_exactly_the_steps_that_were_drawn() -> None:
    assert (fates_of(stragglers(1.0, 0.0, 0.0)).steps_done == 1).all()
    for steps in (1, 3, 7, 1000, 54_321):
        assert (fates_of(stragglers(1.0, 0.5, 0.5), steps=steps).steps_done == max(1, steps // 2)).all()


def test_where_partial_work_does_not_count_stragglers_send_nothing_and_work_until_the_end() -> None:
    part = fates_of(stragglers(0.5))
    nothing = fates_of(stragglers(0.5, partial_work=False))
    slow = part.steps_done < STEPS
    assert np.isinf(nothing.report_s[slow]).all()
    assert (nothing.steps_done[slow] == 0).all()
    assert (nothing.report_s[~slow] == part.report_s[~slow]).all()
    spent = nothing.spent(WINDOW_S)
    assert (spent.bytes_up[slow] == 0).all()
    assert (spent.bytes_down[slow] == 4000).all()
    assert (spent.busy_s[slow] == WINDOW_S).all()


def test_the_same_devices_are_stragglers_whether_partial_work_counts_or_not() -> None:
    part, nothing = (fates_of(stragglers(0.5, partial_work=counts)) for counts in (True, False))
    assert ((part.steps_done < STEPS) == (nothing.steps_done == 0)).all()
