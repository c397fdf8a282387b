"""A site takes part in a run only if its policy does not refuse it, and it or a person allows it."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.client.agent.runs import CHANGED, ONE
from umbel.aggregation.messages import OpenRun
from umbel.client.agent.decisions import SiteDecision
from umbel.client.agent.site_commands import SiteCommands
from umbel.client.agent.verdict import Stand, Verdict, verdict
from umbel.client.policy.policy import SitePolicy

PATTERNS = st.lists(st.sampled_from(["heart-1", "heart-*", "*", "eeg", "?"]), max_size=2).map(tuple)
OTHERS = st.sampled_from([None, "refuse", "ask", "members"])
COMMANDS = SiteCommands.of(Path("/srv/umbel"))
LISTED = SitePolicy(members=Path("pilot.json"))


def judge(
    run: OpenRun = ONE,
    policy: SitePolicy | None = None,
    decision: SiteDecision | None = None,
    app: str | None = "heart:client",
    is_of_members: bool = True,
) -> Verdict:
    return verdict(run, policy, is_of_members=is_of_members, decision=decision, app=app, commands=COMMANDS)


def allowed(run: OpenRun = ONE) -> SiteDecision:
    return SiteDecision.about(run, True, 1e9)


def denied(run: OpenRun = ONE) -> SiteDecision:
    return SiteDecision.about(run, False, 1e9)


def test_without_a_policy_a_person_is_asked_about_each_run() -> None:
    asked = judge()
    assert asked.stand is Stand.ASKED
    assert asked.reason == (
        "decide: umbel site allow heart-1 --state /srv/umbel, or umbel site deny heart-1 --state /srv/umbel"
    )
    assert judge(decision=allowed()) == Verdict(Stand.ALLOWED)
    refused = judge(decision=denied())
    assert refused.stand is Stand.DENIED
    assert refused.reason.endswith("to take part: umbel site allow heart-1 --state /srv/umbel")


@pytest.mark.parametrize("changed", CHANGED)
@pytest.mark.parametrize("decision", [allowed(), denied()])
def test_another_run_of_the_same_name_is_asked_about_again(changed: str, decision: SiteDecision) -> None:
    found = judge(CHANGED[changed], decision=decision)
    assert found.stand is Stand.ASKED
    assert "another run of this name" in found.reason


@pytest.mark.parametrize("decision", [allowed(), denied()])
def test_a_decision_that_covered_less_is_asked_about_again(decision: SiteDecision) -> None:
    before = SiteDecision("d" * 64, decision.is_allowed, decision.at)  # as in a file of before
    for policy in (None, replace(LISTED, allowed_runs=("heart-*",))):
        found = judge(policy=policy, decision=before)
        if policy is not None and decision.is_allowed:
            assert found.stand is Stand.ALLOWED, "by the policy"
            continue
        assert found.stand is Stand.ASKED
        assert "before decisions covered the fewest clients of a sum and the noise; decide again" in found.reason


def test_a_coordinator_does_not_undo_a_denial_by_listing_another_run_of_the_name() -> None:
    policy = replace(LISTED, allowed_runs=("heart-*",))
    other = CHANGED["run_file_sha256"]
    assert judge(other, policy, denied()).stand is Stand.ASKED
    assert judge(other, policy, allowed()).stand is Stand.ALLOWED


def test_what_may_change_in_a_run_asks_nobody_again() -> None:
    later = replace(ONE, created_at=2e9, status=ONE.status)
    assert judge(later, decision=allowed()).stand is Stand.ALLOWED


def test_a_pattern_allows_without_a_person_and_a_person_may_still_deny() -> None:
    policy = replace(LISTED, allowed_runs=("heart-*",))
    assert judge(policy=policy).stand is Stand.ALLOWED
    assert judge(policy=policy, decision=denied()).stand is Stand.DENIED


def test_runs_of_the_members_are_allowed_and_others_are_asked_about() -> None:
    policy = replace(LISTED, other_runs="members")
    assert judge(policy=policy, is_of_members=True).stand is Stand.ALLOWED
    plain, mixed = replace(ONE, is_secure=False), replace(policy, secure_aggregation="allowed")
    assert judge(plain, mixed, is_of_members=False).stand is Stand.ASKED
    assert judge(policy=LISTED, is_of_members=True).stand is Stand.ASKED, "only if the policy says so"


@pytest.mark.parametrize(
    ("policy", "is_of_members", "words"),
    [
        (SitePolicy(allowed_runs=("*",)), False, 'set members = "FILE" in the policy'),
        (replace(LISTED, allowed_runs=("*",)), False, "not bound to the newest member list"),
        (replace(LISTED, allowed_runs=("*",), minimum_cohort=4), True, "minimum must be 4 or more"),
        (replace(LISTED, allowed_runs=("*",), max_parameters=99), True, "max_parameters"),
    ],
)
def test_a_secure_run_is_refused_whose_rounds_the_policy_would_all_decline(
    policy: SitePolicy, words: str, *, is_of_members: bool
) -> None:
    """Else its process would fail in each round, and others' rounds would wait for it."""
    for decision in (None, allowed()):
        found = judge(policy=policy, decision=decision, is_of_members=is_of_members)
        assert found.stand is Stand.REFUSED
        assert words in found.reason


def test_a_plain_run_is_refused_where_rounds_must_be_secure() -> None:
    found = judge(replace(ONE, is_secure=False), LISTED, SiteDecision.about(replace(ONE, is_secure=False), True, 1e9))
    assert found.stand is Stand.REFUSED
    assert "requires secure aggregation" in found.reason


def test_a_run_without_code_says_how_to_give_it_some() -> None:
    found = judge(decision=allowed(), app=None)
    assert found.stand is Stand.NO_APP
    assert "--app 'heart-1=MODULE:NAME'" in found.reason


@pytest.mark.parametrize(
    ("found", "words", "may_change"),
    [
        (judge(), "a person at the site must decide: umbel site allow heart-1", True),
        (judge(decision=denied()), "a person at the site denied it", False),
        (judge(decision=allowed(), app=None), "the site has no code for this run", False),
        (judge(policy=replace(LISTED, minimum_cohort=4)), "minimum must be 4 or more", False),
        (judge(decision=allowed()), "", False),
    ],
)
def test_the_coordinator_may_know_why_and_learns_nothing_of_the_sites_files(
    found: Verdict, words: str, *, may_change: bool
) -> None:
    assert words in found.public_reason
    assert bool(words) is bool(found.public_reason)
    assert "/srv" not in found.public_reason
    assert found.may_change is may_change


@given(
    allowed_runs=PATTERNS,
    denied_runs=PATTERNS,
    other=OTHERS,
    of_members=st.booleans(),
    said=st.sampled_from([None, 0, 1]),
)
def test_the_rules_are_those_of_the_table(
    allowed_runs: tuple[str, ...], denied_runs: tuple[str, ...], other: str | None, of_members: bool, said: int | None
) -> None:
    """Against the table in docs/how-to/run-an-agent.md, written as it reads."""
    policy = SitePolicy(
        members=Path("pilot.json"),
        secure_aggregation="allowed",
        allowed_runs=allowed_runs,
        denied_runs=denied_runs,
        other_runs=other,  # type: ignore[arg-type]  # one of the literals
    )
    run = ONE if of_members else replace(ONE, is_secure=False)  # another secure run is refused, whatever the table says
    decision = None if said is None else SiteDecision.about(run, bool(said), 1e9)
    found = judge(run, policy=policy, decision=decision, is_of_members=of_members).stand
    names = {"heart-1", "heart-*", "*"}
    if names & set(denied_runs):
        expected = Stand.REFUSED
    elif names & set(allowed_runs):
        expected = Stand.DENIED if said == 0 else Stand.ALLOWED
    elif other == "refuse" or (other is None and allowed_runs):
        expected = Stand.REFUSED
    elif said is not None:
        expected = Stand.ALLOWED if said else Stand.DENIED
    else:
        expected = Stand.ALLOWED if other == "members" and of_members else Stand.ASKED
    assert found is expected
