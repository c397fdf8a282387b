"""Who is asked after a sum was opened in vain: whoever it is, sites take part by the very rule that they go by."""

from collections.abc import Collection
from dataclasses import replace

from hypothesis import event, given
from hypothesis import strategies as st

from umbel.aggregation.plans.masks import SecurePlan
from umbel.aggregation.plans.round import CoverageFloor, RoundPlan, Weighting
from umbel.aggregation.round.cohort import Choice, PassedOver
from umbel.aggregation.round.machine import advance
from umbel.aggregation.round.second_sum import NAMES_MAX, OpenedSum, Past, choose_again, with_sum
from umbel.aggregation.round.states import Gathered, Recruiting, SumsBefore, Training
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.secagg.parameters import roster_min, survivors_min
from umbel.aggregation.types import ClientId, RunId
from umbel.client.errors import AttemptRefused
from umbel.client.policy.policy import SitePolicy
from umbel.client.policy.two_sums import check_same_model

PLAN = RoundPlan(
    RunId("ward"), 1, 2, 5, 3, 1.2, 60.0, Weighting.SAMPLES, 1000, 64.0, seed=7, secure=SecurePlan(16, 10, 6)
)
FLEET = tuple(ClientId(f"c{i:02}") for i in range(24))


def waiting(names: Collection[ClientId]) -> list[Candidate]:
    return [Candidate(name, 0) for name in sorted(names)]


def agree(opened: Collection[OpenedSum], clients: Collection[ClientId], n_invited: int, minimum: int) -> bool:
    """Whether the sites of these sums, whose policies go as far as the plan's minimum, take part in one of these."""
    policy = SitePolicy(minimum_cohort=minimum)
    try:
        for one in opened:
            check_same_model(policy, one.clients, clients, max(n_invited, one.n_invited), "round 1")
    except AttemptRefused:
        return False
    return True


def least_of(n_invited: int, minimum: int) -> int:
    """The fewest clients that a sum of so many invited can have."""
    n_with_keys = range(max(minimum, roster_min(n_invited)), n_invited + 1)
    return min(max(minimum, survivors_min(n, n_invited=n_invited)) for n in n_with_keys)


@st.composite
def plans(draw: st.DrawFn) -> RoundPlan:
    minimum = draw(st.integers(3, 6))
    target = minimum + draw(st.integers(0, 3))
    over = draw(st.sampled_from([1.0, 1.25, 2.0]))
    sites = draw(st.sampled_from([(), FLEET[:1], FLEET[:2]]))
    floor = CoverageFloor(sites=sites, strict=bool(sites) and draw(st.booleans()))
    return replace(
        PLAN, target=target, minimum=minimum, over_selection=over, coverage=floor, attempt=draw(st.integers(2, 9))
    )


@st.composite
def sums(draw: st.DrawFn, minimum: int) -> OpenedSum:
    """One that a round can have had."""
    cohort = draw(st.lists(st.sampled_from(FLEET), min_size=minimum, max_size=14, unique=True))
    n = draw(st.integers(least_of(len(cohort), minimum), len(cohort)))
    return OpenedSum(tuple(sorted(cohort[:n])), len(cohort))


@given(data=st.data(), plan=plans(), waited_s=st.sampled_from([0.0, 1.0, 7.0]))
def test_whoever_is_asked_the_sites_take_part_unless_they_are_said_to_decide(
    data: st.DataObject, plan: RoundPlan, waited_s: float
) -> None:
    """If all come; and where not all of them are needed, whoever of them comes."""
    opened = tuple(data.draw(st.lists(sums(plan.minimum), min_size=1, max_size=2, unique=True)))
    named = sorted({name for one in opened for name in one.clients})
    avoid = data.draw(st.frozensets(st.sampled_from(FLEET), max_size=3))
    liars = data.draw(st.frozensets(st.sampled_from(sorted(avoid)), max_size=2)) if avoid else avoid
    removed = data.draw(st.one_of(st.just(frozenset[ClientId]()), st.frozensets(st.sampled_from(named), max_size=1)))
    n_away = data.draw(st.integers(0, len(FLEET)))
    away = set(data.draw(st.permutations(FLEET))[:n_away]) - (set(named) if data.draw(st.booleans()) else set())
    here = set(FLEET) - away - removed

    choice = choose_again(plan, waiting(here), waited_s, Past(opened, avoid, liars, removed))

    assert choice.why
    kind = kind_of(choice)
    event(kind)
    if choice.cohort is None:
        return
    cohort = set(choice.cohort)
    assert cohort <= here
    assert plan.minimum <= len(cohort) <= plan.n_wanted
    assert choice.passed_over.clients == len(here) - len(cohort)
    if kind == "anybody":
        is_hindered = removed | liars | (set(named) - here)
        are_near = any(not agree(opened, one.clients, len(one.clients), plan.minimum) for one in opened)
        are_many = any(len(one.clients) > plan.n_wanted for one in opened)
        assert is_hindered or are_near or are_many, "the same clients could have been asked"
        return
    assert agree(opened, cohort, len(cohort), plan.minimum)
    if not choice.needs_all:
        n_least = least_of(len(cohort), plan.minimum)
        assert agree(opened, sorted(cohort)[:n_least], len(cohort), plan.minimum), "so few, and they are still too near"


def kind_of(choice: Choice) -> str:
    if choice.cohort is None:
        return "waits"
    if "sites may refuse" in choice.why:
        return "anybody"
    return "all of them" if choice.needs_all else "others"


# --- by examples ------------------------------------------------------------------------------------------------------

OPENED = OpenedSum(FLEET[:5], 6)  # a sixth was asked, and not needed
PAST = Past((OPENED,))


def chosen(
    names: Collection[ClientId], past: Past = PAST, waited_s: float = 0.0, plan: RoundPlan = PLAN
) -> tuple[set[ClientId], Choice]:
    choice = choose_again(plan, waiting(names), waited_s, past)
    return set(choice.cohort or ()), choice


def test_enough_others_are_drawn_as_in_any_round() -> None:
    cohort, choice = chosen(FLEET[:11])
    assert cohort == set(FLEET[5:11])
    assert not choice.needs_all
    assert choice.passed_over == PassedOver(5, 0)
    assert choice.why == (
        "drew 6 of 6 waiting clients; the round wants 6 to get 5 reports; "
        "none of them is in an earlier sum over this model"
    )


def test_where_others_are_too_few_the_very_same_are_asked_and_nobody_else() -> None:
    cohort, choice = chosen(FLEET[:10])
    assert cohort == set(FLEET[:5])
    assert choice.needs_all
    assert choice.passed_over == PassedOver(5, 0)
    assert choice.why == "only the 5 clients of an earlier sum over this model are asked, and all must report"


def test_the_same_are_waited_for_by_name_as_long_as_patience_lasts() -> None:
    present = [*FLEET[:3], *FLEET[5:7]]
    cohort, choice = chosen(present, waited_s=4.0)
    assert not cohort
    assert choice.why == (
        "5 clients wait; waiting 2.0 s more for c03, c04: "
        "a sum over this model was already unmasked, and sites accept another only from the same clients"
    )
    cohort, choice = chosen(present, waited_s=6.0)
    assert cohort == set(present)
    assert not choice.needs_all
    assert choice.why == (
        "drew 5 of 5 waiting clients; the round wants 6 to get 5 reports; "
        "sites may refuse, because a sum over this model was "
        "already unmasked; clients of that sum are not waiting: c03, c04"
    )


def test_when_patience_is_over_a_few_others_do_without_those_who_did_not_come() -> None:
    cohort, choice = chosen([*FLEET[:4], *FLEET[5:8]], waited_s=6.0)
    assert (cohort, choice.needs_all) == (set(FLEET[5:8]), False)


def test_who_was_silent_is_left_out_where_those_in_its_place_make_it_far_enough() -> None:
    silent = replace(PAST, avoid=frozenset(FLEET[:3]))
    cohort, choice = chosen(FLEET[:8], silent)
    assert cohort == set(FLEET[3:8])
    assert choice.needs_all
    assert choice.passed_over == PassedOver(3, 0)
    cohort, choice = chosen(FLEET[:7], silent)
    assert (cohort, choice.needs_all) == (set(FLEET[:5]), True), "else it is asked again"


def test_who_has_lied_is_left_out_where_enough_others_wait_and_the_sites_decide() -> None:
    liar = replace(PAST, avoid=frozenset(FLEET[:1]), liars=frozenset(FLEET[:1]))
    cohort, choice = chosen(FLEET[:7], liar)
    assert (cohort, choice.needs_all) == (set(FLEET[1:7]), False)
    assert choice.why.endswith("already unmasked; clients of that sum broke the protocol: c00")
    cohort, choice = chosen(FLEET[:6], liar)
    assert (cohort, choice.needs_all) == (set(FLEET[:5]), True)


def test_for_who_was_removed_nobody_waits_and_the_sites_decide() -> None:
    cohort, choice = chosen(FLEET[1:7], replace(PAST, removed=frozenset(FLEET[:1])))
    assert (cohort, choice.needs_all) == (set(FLEET[1:7]), False)
    assert choice.why.endswith("already unmasked; the operator has removed clients of that sum: c00")


def test_of_two_sums_that_are_too_near_each_other_neither_can_be_made_again() -> None:
    near = OpenedSum((*FLEET[:4], FLEET[5]), 6)
    cohort, choice = chosen(FLEET[:6], Past((OPENED, near)))
    assert (cohort, choice.needs_all) == (set(FLEET[:6]), False)
    assert "too similar to those of another" in choice.why


def test_of_two_sums_without_a_common_client_either_can_the_newer_first() -> None:
    both = Past((OPENED, OpenedSum(FLEET[5:10], 6)))
    assert chosen(FLEET[:10], both)[0] == set(FLEET[5:10])
    assert chosen(FLEET[:9], both)[0] == set(FLEET[:5])


def test_a_site_that_coverage_insists_on_is_not_left_out_for_others() -> None:
    plan = replace(PLAN, coverage=CoverageFloor(sites=FLEET[:1], strict=True))
    assert chosen(FLEET, plan=plan)[0] == set(FLEET[:5])


def test_of_a_sum_that_is_opened_in_vain_again_the_greater_cohort_counts() -> None:
    same = OpenedSum(OPENED.clients, 5)
    other = OpenedSum(FLEET[5:10], 6)
    assert with_sum((OPENED, other), same) == (other, OPENED)


def test_no_more_names_are_kept_than_go_with_every_state() -> None:
    small, large = OpenedSum(FLEET[:5], 6), OpenedSum(tuple(ClientId(f"n{i}") for i in range(NAMES_MAX)), NAMES_MAX)
    assert with_sum((small,), large) == (large,)
    assert with_sum((), OpenedSum((*large.clients, FLEET[0]), NAMES_MAX + 1)) == ()


def test_while_a_cohort_is_asked_again_the_round_says_whom_it_needs() -> None:
    """An operator sees it for the length of the window; of other rounds there is nothing to say."""
    names = FLEET[:6]
    gathered = Gathered(0.0, tuple(waiting(names)), bytes(48))
    fresh, _ = advance(Recruiting(PLAN, 0.0), gathered)
    again, _ = advance(Recruiting(PLAN, 0.0, before=SumsBefore((OpenedSum(names, 6),))), gathered)
    assert isinstance(fresh, Training)
    assert isinstance(again, Training)
    assert fresh.secure
    assert again.secure
    assert fresh.secure.why == ""
    assert again.secure.why.startswith("only the 6 clients of an earlier sum over this model")
