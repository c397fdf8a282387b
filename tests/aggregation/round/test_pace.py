"""When clients come back: small populations together, large ones spread, never more than the load that is allowed."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.messages import Outcome
from umbel.aggregation.plans.round import RoundPlan, Weighting
from umbel.aggregation.round.cohort import Member
from umbel.aggregation.round.pace import COME_BACK_MIN_S, NEEDED_MAX_S, Demand, come_back_s, opens_in_s
from umbel.aggregation.round.states import Abandoned, Closing, Recruiting, Training
from umbel.aggregation.types import ClientId, RunId

SALT = b"a secret of the run"
NOW = 1.8e9
LOAD = 200.0
PLAN = RoundPlan(RunId("demo"), 1, 1, 2, 1, 1.5, 60.0, Weighting.SAMPLES, 1000, 64.0, seed=7)


def clients(n: int) -> list[ClientId]:
    return [ClientId(f"c{i}") for i in range(n)]


demands = st.builds(
    Demand,
    population=st.integers(1, 10_000_000),
    wanted=st.integers(1, 10_000),
    opens_in_s=st.sampled_from([0.0, 5.0, 300.0]),
    every_s=st.floats(1, 7200),
    check_ins_per_s_max=st.floats(1, 5000),
)


@pytest.mark.parametrize("population", [10**3, 10**4, 10**5, 10**6, 10**7])
@pytest.mark.parametrize("opens_in", [0.0, 300.0])
def test_the_load_stays_bounded_as_the_fleet_grows(population: int, opens_in: float) -> None:
    """A sample of the fleet, all of whom ask at once, is followed through its check-ins; the load is scaled up."""
    demand = Demand(population, wanted=390, opens_in_s=opens_in, every_s=600.0, check_ins_per_s_max=LOAD)
    sample = clients(1000)
    arrivals = [NOW + come_back_s(demand, NOW, client, SALT) for client in sample]
    if not demand.is_small:
        for _ in range(4):
            arrivals += [at + come_back_s(demand, at, c, SALT) for at, c in zip(arrivals[-1000:], sample, strict=True)]
    scale = population / len(sample)
    step_s = max(demand.least_cycle_s, COME_BACK_MIN_S)
    counts = np.bincount(((np.array(arrivals) - NOW) / step_s).astype(int)) * scale
    scatter = 5 * math.sqrt(LOAD * step_s * scale)  # Poisson, of the sample
    assert counts.max() <= LOAD * step_s + scatter


def test_a_herd_is_even_in_the_next_cycle() -> None:
    demand = Demand(10**6, 390, 0.0, 600.0, LOAD)
    arrivals = np.array([come_back_s(demand, NOW, client, SALT) for client in clients(20_000)])
    cycle_s = arrivals.max() - arrivals.min()
    assert demand.cycle_s <= cycle_s <= demand.cycle_s * 1.2  # rounded up by a quarter of an octave at most
    counts, _ = np.histogram(arrivals, bins=20)
    assert counts.min() > 850
    assert counts.max() < 1150


@given(population=st.integers(1, 1000), opens_in=st.floats(1, 600))
def test_a_small_fleet_comes_together_at_the_next_opening(population: int, opens_in: float) -> None:
    demand = Demand(population, wanted=population, opens_in_s=opens_in, every_s=600.0, check_ins_per_s_max=LOAD)
    asked_at = [NOW + i * opens_in / 50 for i in range(50)]
    arrivals = [
        at + come_back_s(replace(demand, opens_in_s=NOW + opens_in - at), at, client, SALT)
        for at, client in zip(asked_at, clients(50), strict=True)
    ]
    assert min(arrivals) >= NOW + opens_in - 1e-3
    assert max(arrivals) - min(arrivals) <= 5.0 + COME_BACK_MIN_S


def test_while_a_round_asks_a_small_fleet_comes_at_once() -> None:
    demand = Demand(50, wanted=50, opens_in_s=0.0, every_s=600.0, check_ins_per_s_max=LOAD)
    waits = [come_back_s(demand, NOW, client, SALT) for client in clients(50)]
    assert max(waits) <= 2 * COME_BACK_MIN_S


def test_large_fleets_come_no_oftener_than_rounds_need_them() -> None:
    """A million clients, of which 300 are wanted at a time: each comes some once in six hours, not every hour."""
    demand = Demand(10**6, wanted=300, opens_in_s=0.0, every_s=60.0, check_ins_per_s_max=5000.0)
    assert demand.cycle_s == NEEDED_MAX_S
    enough = replace(demand, population=10**5)
    assert enough.cycle_s == pytest.approx(1e5 * 30 / (1.5 * 300))
    assert enough.population / enough.cycle_s * 30 == pytest.approx(1.5 * 300)  # so many wait at any moment


@given(demands, st.text("abc", min_size=1, max_size=5))
def test_the_moment_is_certain_bounded_and_needs_no_memory(demand: Demand, name: str) -> None:
    wait_s = come_back_s(demand, NOW, ClientId(name), SALT)
    assert wait_s == come_back_s(demand, NOW, ClientId(name), SALT)
    assert COME_BACK_MIN_S <= wait_s <= max(2 * 1.19 * max(demand.cycle_s, 1), demand.opens_in_s + demand.least_cycle_s)


def test_nobody_can_pick_a_name_that_always_comes_first() -> None:
    demand = Demand(10**6, 390, 0.0, 600.0, LOAD)
    first = {
        salt: min(clients(100), key=lambda client: come_back_s(demand, NOW, client, salt))
        for salt in (b"a", b"b", b"c")
    }
    assert len(set(first.values())) > 1
    by_cycle = {min(clients(100), key=lambda c: come_back_s(demand, NOW + k * 6000, c, SALT)) for k in range(5)}
    assert len(by_cycle) > 1


def test_an_estimate_that_wavers_does_not_move_the_cycles() -> None:
    demand = Demand(10**6, 390, 0.0, 600.0, LOAD)
    other = replace(demand, population=10**6 - 20_000)
    waits = [[come_back_s(d, NOW, client, SALT) for client in clients(20)] for d in (demand, other)]
    assert waits[0] == waits[1]


@pytest.mark.parametrize(
    "change",
    [{"population": 0}, {"wanted": 0}, {"every_s": 0.0}, {"check_ins_per_s_max": math.nan}, {"opens_in_s": -1.0}],
)
def test_a_demand_that_makes_no_sense_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be|from 1 on"):
        replace(Demand(10, 5, 0.0, 60.0, 100.0), **change)  # type: ignore[arg-type]  # mixed on purpose


def test_the_next_opening_is_guessed_from_what_rounds_took() -> None:
    training = Training(PLAN, {ClientId("a"): Member(1, 1)}, opened_at=100.0)
    assert opens_in_s(training, 110.0, typical_open_s=None) == 50.0
    assert opens_in_s(training, 110.0, typical_open_s=30.0) == 20.0
    assert opens_in_s(training, 140.0, typical_open_s=30.0) == 20.0  # longer than usual: until the window's end
    assert opens_in_s(training, 170.0, typical_open_s=30.0) == 0.0
    assert opens_in_s(Recruiting(PLAN, 0.0), 5.0, None) == 0.0
    assert opens_in_s(Recruiting(PLAN, 9.0, not_before=9.0), 5.0, None) == 4.0
    closing = Closing(PLAN, {}, {}, {}, Outcome.LATE, "", 0.0, 1.0)
    assert opens_in_s(closing, 5.0, None) == opens_in_s(Abandoned(PLAN, "", {}, {}, {}, 0.0, 1.0), 5.0, None) == 0.0
