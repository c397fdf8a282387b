"""Who is invited, and the reason in words."""

from dataclasses import replace
from decimal import ROUND_CEILING, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.aggregation.plans.round import CoverageFloor, RoundPlan, Weighting
from umbel.aggregation.round.cohort import Choice, PassedOver, choose
from umbel.aggregation.round.weighting import Candidate, weight_of
from umbel.aggregation.types import ClientId, RunId

PLAN = RoundPlan(RunId("demo"), 3, 1, 4, 2, 1.5, 60.0, Weighting.SAMPLES, 1000, 64.0, seed=7)


def waiting(n: int, sample_count: int = 10) -> list[Candidate]:
    return [Candidate(ClientId(f"c{i}"), sample_count) for i in range(n)]


def draws(choice: Choice) -> dict[ClientId, int]:
    return {client: member.draws for client, member in (choice.cohort or {}).items()}


def test_enough_clients_start_the_round_at_once() -> None:
    choice = choose(PLAN, waiting(9), waited_s=0)
    assert choice.cohort is not None
    assert len(choice.cohort) == 6
    assert choice.why == "drew 6 of 9 waiting clients; the round wants 6 to get 4 reports"


def test_the_round_waits_for_a_full_cohort_while_it_has_patience() -> None:
    choice = choose(PLAN, waiting(5), waited_s=4)
    assert choice.cohort is None
    assert choice.why == "waiting for clients: 5 of 6 here; starting with these in at most 2.0 s"


def test_out_of_patience_the_minimum_is_enough() -> None:
    choice = choose(PLAN, waiting(2), waited_s=6)
    assert draws(choice) == {"c0": 1, "c1": 1}


def test_below_the_minimum_the_round_waits_for_ever() -> None:
    choice = choose(PLAN, waiting(1), waited_s=1e9)
    assert choice.cohort is None
    assert choice.why == "waiting for clients: 1 of 6 here, at least 2 needed to start"


def test_one_client_makes_a_round_if_the_plan_says_so() -> None:
    plan = replace(PLAN, target=1, minimum=1, over_selection=1.0)
    assert draws(choose(plan, waiting(1), waited_s=0)) == {"c0": 1}
    assert draws(choose(replace(plan, weighting=Weighting.PROPORTIONAL), waiting(1), waited_s=0)) == {"c0": 1}
    assert choose(plan, [], waited_s=1e9).cohort is None


def test_clients_without_samples_are_passed_over() -> None:
    choice = choose(PLAN, [*waiting(2), *waiting(0), Candidate(ClientId("empty"), 0)], waited_s=99)
    assert choice.cohort is not None
    assert "empty" not in choice.cohort


def test_a_boast_is_worth_no_more_than_the_maximum_in_the_draw() -> None:
    plan = replace(PLAN, weighting=Weighting.PROPORTIONAL, target=1000, over_selection=1.0)
    honest = [Candidate(ClientId("a"), 1000), Candidate(ClientId("b"), 1000)]
    boast = [Candidate(ClientId("a"), 1 << 40), Candidate(ClientId("b"), 1000)]
    assert draws(choose(plan, boast, 99)) == draws(choose(plan, honest, 99))


def test_each_round_and_each_attempt_draws_afresh() -> None:
    plans = [PLAN, replace(PLAN, attempt=2), replace(PLAN, number=4), replace(PLAN, seed=8)]
    cohorts = {tuple(choose(plan, waiting(40), 0).cohort or ()) for plan in plans}
    assert len(cohorts) == 4


@given(st.integers(1, 1 << 20), st.integers(1000, 10_000))
def test_as_many_are_wanted_as_decimal_arithmetic_says(target: int, thousandths: int) -> None:
    plan = replace(PLAN, target=target, minimum=1, over_selection=thousandths / 1000, sample_count_max=1)
    exact = target * Decimal(thousandths) / 1000
    assert plan.n_wanted == int(exact.to_integral_value(ROUND_CEILING))


@pytest.mark.parametrize(("window_s", "patience_s"), [(0.5, 0.2), (60.0, 6.0), (600.0, 30.0)])
def test_patience_derives_from_the_window(window_s: float, patience_s: float) -> None:
    assert replace(PLAN, window_s=window_s).patience_s == pytest.approx(patience_s)


def test_a_cohort_is_drawn_again_until_the_minimum_of_clients_is_in_it() -> None:
    plan = replace(PLAN, weighting=Weighting.PROPORTIONAL, target=2, minimum=2, over_selection=1.0)
    able = [Candidate(ClientId("large"), 90), *(Candidate(ClientId(f"small-{i}"), 5) for i in range(2))]
    for attempt in range(1, 40):
        cohort = choose(replace(plan, attempt=attempt), able, waited_s=60.0).cohort
        assert cohort is not None
        assert len(cohort) == 2


def test_where_no_draw_reaches_the_minimum_the_reason_says_what_to_change() -> None:
    plan = replace(PLAN, weighting=Weighting.PROPORTIONAL, target=2, minimum=2, over_selection=1.0)
    plan = replace(plan, sample_count_max=1 << 30)
    able = [Candidate(ClientId("large"), 1 << 30), Candidate(ClientId("small"), 1)]
    choice = choose(plan, able, waited_s=60.0)
    assert choice.cohort is None
    assert "lower sample_count_max" in choice.why


# --- who must be in it ------------------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("weighting", list(Weighting))


def covered(weighting: Weighting, sites: tuple[str, ...] = (), tiers: tuple[str, ...] = ()) -> RoundPlan:
    floor = CoverageFloor(sites=tuple(ClientId(site) for site in sites), tiers=tiers)
    return replace(PLAN, weighting=weighting, coverage=floor)


@BOTH
def test_a_named_site_that_waits_is_in_every_cohort_and_none_grows(weighting: Weighting) -> None:
    for number in range(1, 60):
        plan = replace(covered(weighting, ("c7", "c31")), number=number)
        cohort = draws(choose(plan, waiting(40), waited_s=0))
        assert {"c7", "c31"} <= cohort.keys()
        assert sum(cohort.values()) == plan.n_wanted


@BOTH
def test_a_named_tier_that_waits_has_a_client_in_every_cohort(weighting: Weighting) -> None:
    rare = [Candidate(ClientId(f"r{i}"), 1, "rare") for i in range(3)]
    taken: set[ClientId] = set()
    for number in range(1, 60):
        plan = replace(covered(weighting, tiers=("rare",)), number=number)
        taken |= choose(plan, [*waiting(60), *rare], waited_s=0).cohort.keys() & {one.client for one in rare}  # type: ignore[union-attr]  # there is one
    assert taken == {"r0", "r1", "r2"}, "drawn evenly from the tier, not always the same"


def test_a_site_stands_for_its_tier() -> None:
    able = [*waiting(60), Candidate(ClientId("north"), 10, "rare"), Candidate(ClientId("south"), 10, "rare")]
    drawn = [
        choose(replace(covered(Weighting.SAMPLES, ("north",), ("rare",)), number=n), able, 0).cohort
        for n in range(1, 40)
    ]
    n_south = sum("south" in (cohort or {}) for cohort in drawn)
    assert all("north" in (cohort or {}) for cohort in drawn)
    assert n_south < 12, "no more often than by chance"


def test_the_round_waits_for_what_is_named_while_it_has_patience() -> None:
    plan = covered(Weighting.SAMPLES, ("north",), ("rare",))
    choice = choose(plan, waiting(9), waited_s=4)
    assert choice.cohort is None
    assert choice.why == "9 clients wait; waiting 2.0 s more for site north, tier rare"
    assert choose(plan, waiting(9), waited_s=6).cohort is not None


def test_where_all_are_asked_a_name_changes_nothing() -> None:
    plain = choose(PLAN, waiting(6), waited_s=0)
    assert choose(covered(Weighting.SAMPLES, ("c3",)), waiting(6), waited_s=0) == plain
    assert plain.passed_over == PassedOver(0, 0)


def test_who_waited_and_was_not_drawn_is_counted_at_what_it_is_worth() -> None:
    choice = choose(PLAN, waiting(9, sample_count=5000), waited_s=0)
    assert choice.passed_over == PassedOver(3, 3 * PLAN.sample_count_max)


@given(
    st.lists(st.integers(1, 500), min_size=6, max_size=30),
    st.sets(st.integers(0, 5), max_size=2),
    st.sampled_from(Weighting),
    st.integers(1, 50),
    st.sets(st.integers(0, 29)),
)
def test_whoever_is_named_the_bound_on_weights_holds(
    counts: list[int], named: set[int], weighting: Weighting, number: int, avoided: set[int]
) -> None:
    able = [Candidate(ClientId(f"c{i}"), count, "even" if i % 2 == 0 else "odd") for i, count in enumerate(counts)]
    plan = replace(covered(weighting, tuple(f"c{i}" for i in named), ("odd",)), number=number)
    cohort = draws(choose(plan, able, 99, [ClientId(f"c{i}") for i in avoided]))
    assert {f"c{i}" for i in named} <= cohort.keys()
    assert any(int(client[1:]) % 2 for client in cohort)
    assert sum(cohort.values()) <= plan.n_wanted
    assert sum(weight_of(weighting, n, plan.sample_count_max) for n in cohort.values()) <= plan.total_weight_max
