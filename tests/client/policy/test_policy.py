"""A site's own limits hold whatever its coordinator asks."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.federations.consortium import SITES, after, first_list
from umbel.aggregation.messages import REASON_CHARS_MAX
from umbel.aggregation.plans.masks import NoisePlan
from umbel.client.errors import AttemptRefused, WorkRefused
from umbel.client.policy.policy import EPSILON_MAX, SecureTerms, SitePolicy, read_policy
from umbel.client.policy.two_sums import check_cohort_change, check_same_model, check_terms_change

LISTED = SitePolicy(members=Path("pilot.json"))
ROUND = SecureTerms(cohort=SITES, minimum=3, threshold=3, n_holders=3, n_parameters=1000, epsilon=None)
HASH = "0123456789abcdef" * 4


def test_without_a_file_both_kinds_of_rounds_are_allowed_and_three_clients_the_least() -> None:
    policy = SitePolicy()
    policy.check_run("any")
    policy.check_plain_round(10**9)
    assert (policy.requires_secure_rounds, policy.minimum_cohort, policy.retrain_after_release) == (False, 3, True)


def test_a_secure_round_needs_the_member_list() -> None:
    with pytest.raises(WorkRefused, match="could otherwise make up the other clients"):
        SitePolicy().check_secure_round(ROUND)
    LISTED.check_secure_round(ROUND)


def test_a_site_that_requires_secure_aggregation_takes_part_in_nothing_else() -> None:
    with pytest.raises(WorkRefused, match="requires secure aggregation"):
        replace(LISTED, secure_aggregation="required").check_plain_round(1)


def test_who_names_a_member_list_takes_a_plain_round_only_if_the_policy_says_that_it_is_allowed() -> None:
    with pytest.raises(WorkRefused, match="requires secure aggregation"):
        LISTED.check_plain_round(1)
    replace(LISTED, secure_aggregation="allowed").check_plain_round(1)
    assert not LISTED.tells_count
    assert replace(LISTED, secure_aggregation="allowed").tells_count


REFUSED: Mapping[str, tuple[SitePolicy, SecureTerms, str]] = {
    "a sum of two": (
        LISTED,
        replace(ROUND, minimum=2),
        "a sum of at least 3 clients, and this round could unmask a sum of 2",
    ),
    "a cohort of two": (LISTED, replace(ROUND, cohort=SITES[:2]), "could unmask a sum of 2"),
    "a cohort of one that is said thrice": (LISTED, replace(ROUND, cohort=SITES[:1] * 3), "could unmask a sum of 1"),
    "fewer than the policy's five": (replace(LISTED, minimum_cohort=5), ROUND, "a sum of at least 5 clients"),
    "threshold 1": (LISTED, replace(ROUND, threshold=1), "at least 3 of 3 clients"),
    "threshold 2 of 3": (LISTED, replace(ROUND, threshold=2), "this round's is 2"),
    "threshold 6 of 10": (LISTED, replace(ROUND, threshold=6, n_holders=10), "at least 7 of 10"),
    "threshold 4 of 3": (LISTED, replace(ROUND, threshold=4), "this round's is 4"),
    "a larger model": (
        replace(LISTED, max_parameters=999),
        ROUND,
        "at most 999 parameters, and this model has 1000: raise max_parameters in the policy if",
    ),
    "no noise": (replace(LISTED, epsilon=2.0), ROUND, "adds no noise"),
    "beyond the budget": (
        replace(LISTED, epsilon=2.0),
        replace(ROUND, epsilon=2.1),
        "to epsilon 2.1, and its budget .epsilon. is 2",
    ),
    "noise of too few": (
        replace(LISTED, colluders=2),
        replace(ROUND, epsilon=1.0, colluders=1),
        "against 2 colluding clients, and this round's noise holds against 1",
    ),
    "beyond the budget of all runs": (
        replace(LISTED, epsilon=3.0, epsilon_total=2.0),
        replace(ROUND, epsilon=0.5, epsilon_total=2.1),
        "for all runs together to epsilon 2.1, and its budget .epsilon_total. is 2",
    ),
    "no noise, with a budget of all runs": (replace(LISTED, epsilon_total=2.0), ROUND, "adds no noise"),
    "a budget that is no number": (replace(LISTED, epsilon=2.0), replace(ROUND, epsilon=math.nan), "to epsilon nan"),
}


@pytest.mark.parametrize(("policy", "asked", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_a_round_beyond_the_limits_is_refused(policy: SitePolicy, asked: SecureTerms, sentence: str) -> None:
    with pytest.raises(WorkRefused, match=sentence):
        policy.check_secure_round(asked)


OTHERS_MAY_COME = {"a cohort of two", "a cohort of one that is said thrice", *(n for n in REFUSED if "threshold" in n)}


@pytest.mark.parametrize("name", REFUSED)
def test_what_hangs_on_who_is_in_the_cohort_is_of_this_attempt_alone(name: str) -> None:
    """What the run always asks is not: no other cohort would mend it."""
    policy, asked, _ = REFUSED[name]
    with pytest.raises(WorkRefused) as refused:
        policy.check_secure_round(asked)
    assert isinstance(refused.value, AttemptRefused) == (name in OTHERS_MAY_COME)


def test_of_both_the_run_is_named_first() -> None:
    """Else a client would wait for another cohort in a run that it can never take part in."""
    beyond = replace(ROUND, cohort=SITES[:2], threshold=1, minimum=4)
    for policy, asked in (
        (replace(LISTED, minimum_cohort=5), beyond),
        (replace(LISTED, max_parameters=999), beyond),
        (replace(LISTED, epsilon=1.0), beyond),
        (replace(LISTED, colluders=2), replace(beyond, colluders=1)),
    ):
        with pytest.raises(WorkRefused) as refused:
            policy.check_secure_round(asked)
        assert not isinstance(refused.value, AttemptRefused)


@pytest.mark.parametrize(
    ("policy", "asked", "sentence"),
    [
        (
            replace(LISTED, minimum_cohort=5),
            ROUND,
            r"\(minimum_cohort = 5\) requires .* at least 5 .* sum of 3: the run file's minimum must be 5 or more",
        ),
        (
            LISTED,
            replace(ROUND, cohort=SITES[:2]),
            r"\(minimum_cohort = 3\) requires .* at least 3 .* sum of 2: at least 3 clients must take part",
        ),
        (
            replace(LISTED, threshold_share=0.9),
            replace(ROUND, threshold=4, n_holders=5),
            r"\(threshold_share = 0.9\) requires .* at least 5 of 5 .* is 4\. .* if none does, lower threshold_share",
        ),
    ],
    ids=["minimum", "cohort", "threshold"],
)
def test_a_refusal_names_the_setting_both_numbers_and_what_would_do(
    policy: SitePolicy, asked: SecureTerms, sentence: str
) -> None:
    with pytest.raises(WorkRefused, match=sentence):
        policy.check_secure_round(asked)


@pytest.mark.parametrize("key", ["epsilon", "epsilon_total"])
def test_the_coordinator_hears_of_no_budget_how_much_is_spent(key: str) -> None:
    """Of other coordinators' runs it is no business of this one's; the site's own log has the numbers."""
    policy = replace(LISTED, **{key: 2.25})  # type: ignore[arg-type]  # a budget by name
    with pytest.raises(WorkRefused) as refusal:
        policy.check_secure_round(replace(ROUND, **{key: 3.125}))  # type: ignore[arg-type]  # and its cost
    assert "3.125" in str(refusal.value)
    assert refusal.value.public_reason.startswith("this site's privacy budget does not allow this round"), (
        "of one run, or of all"
    )
    assert not any(character.isdigit() for character in refusal.value.public_reason)


def test_what_a_policy_refuses_has_room_for_what_to_do_however_many_and_long_the_names_are() -> None:
    names = [f"{number:x>63}" for number in range(100)]
    policy = replace(LISTED, minimum_cohort=100, cohort_change="refuse")
    with pytest.raises(AttemptRefused, match="and 47 others") as changed:
        check_cohort_change(policy, names, names[50:], "an earlier attempt at round 1000")
    with pytest.raises(AttemptRefused, match="and 47 others") as same:
        check_same_model(policy, names, names[50:], 100, f"round 1000 of run {'r' * 63!r}")
    with pytest.raises(AttemptRefused, match="under other terms") as terms:
        check_terms_change(policy, names, names, 100, "round 1000")
    assert changed.value.public_reason.endswith(
        'Or sites that accept the risk can set cohort_change = "warn" in their policies'
    )
    assert max(len(one.value.public_reason) for one in (changed, same, terms)) <= REASON_CHARS_MAX


def test_a_round_within_the_limits_is_taken() -> None:
    cohort = [f"site-{number}" for number in range(10)]
    asked = SecureTerms(cohort, minimum=5, threshold=7, n_holders=10, n_parameters=10, epsilon=2.0)
    replace(LISTED, minimum_cohort=5, max_parameters=10, epsilon=2.0).check_secure_round(asked)


def test_a_plain_round_minds_size_and_budget_too() -> None:
    with pytest.raises(WorkRefused, match="999 parameters"):
        SitePolicy(max_parameters=999).check_plain_round(1000)
    with pytest.raises(WorkRefused, match="adds no noise"):
        SitePolicy(epsilon=1.0).check_plain_round(1)
    with pytest.raises(WorkRefused, match=r"\(epsilon_total\), and this round adds no noise"):
        SitePolicy(epsilon_total=1.0).check_plain_round(1)


@given(st.integers(1, 100_000))
def test_the_least_threshold_is_two_thirds_and_one_exactly(n: int) -> None:
    assert SitePolicy().threshold_least(n) == 2 * n // 3 + 1
    assert SitePolicy(threshold_share=0.6667).threshold_least(n) == 2 * n // 3 + 1, "as a person writes it"


@given(st.integers(1, 1000), st.floats(0.5, 1, exclude_max=True))
def test_a_threshold_that_is_asked_for_can_be_met_and_is_more_than_half(n: int, share: float) -> None:
    least = SitePolicy(threshold_share=share).threshold_least(n)
    assert n < 2 * least <= 2 * (n + 1)


@pytest.mark.parametrize(
    ("policy", "is_refused"),
    [
        (SitePolicy(), False),
        (SitePolicy(cohort_change="refuse"), True),
        (LISTED, True),
        (replace(LISTED, secure_aggregation="allowed"), True),
        (replace(LISTED, cohort_change="warn"), False),
    ],
    ids=["no list", "refuse", "a list", "a list, and plain rounds", "warn"],
)
def test_who_names_a_member_list_takes_no_round_with_one_client_more_or_less(
    policy: SitePolicy, is_refused: bool
) -> None:
    """Unless the policy says that a warning is enough."""
    assert policy.refuses_cohort_change == is_refused
    ten = [f"site-{number}" for number in range(10)]
    if not is_refused:
        assert "differ only by site-0, so" in (check_cohort_change(policy, ten, ten[1:], "round 1") or "")
        return
    with pytest.raises(
        AttemptRefused,
        match=r'differ only by site-0, so .* the same clients .* Or sites .* can set cohort_change = "warn"',
    ):
        check_cohort_change(policy, ten, ten[1:], "round 1")


def test_only_runs_that_are_named_are_allowed() -> None:
    policy = SitePolicy(allowed_runs=("pilot", "second"))
    policy.check_run("pilot")
    with pytest.raises(WorkRefused, match="does not allow run 'third'"):
        policy.check_run("third")


def test_patterns_name_runs_and_a_denied_run_is_refused_whatever_else_is_said() -> None:
    policy = SitePolicy(allowed_runs=("heart-*", "e?g"), denied_runs=("heart-test*",))
    for run in ("heart-1", "heart-", "eeg"):
        policy.check_run(run)
    for run in ("heart", "eegs", "Heart-1"):
        with pytest.raises(WorkRefused, match="does not allow run"):
            policy.check_run(run)
    with pytest.raises(WorkRefused, match=r"denies run 'heart-test-3' \(denied_runs\)"):
        policy.check_run("heart-test-3")


@pytest.mark.parametrize("other", ["ask", "members"])
def test_a_person_who_starts_a_join_has_confirmed_the_run(other: Literal["ask", "members"]) -> None:
    replace(LISTED, allowed_runs=("pilot",), other_runs=other).check_run("second")


def test_a_site_may_refuse_every_run() -> None:
    with pytest.raises(WorkRefused, match="does not allow run 'pilot'"):
        SitePolicy(other_runs="refuse").check_run("pilot")


def test_a_hundred_hosts_of_links_can_be_named() -> None:
    assert len(SitePolicy(link_hosts=tuple(f"store-{i}:9000" for i in range(100))).link_rules.named) == 100


def test_a_list_older_than_the_policy_takes_is_refused() -> None:
    second = after(first_list())
    policy = replace(LISTED, members_epoch=2)
    policy.check_members(second)
    with pytest.raises(WorkRefused, match=r"list 'pilot' is at epoch 1, .* \(members_epoch\) requires 2 or later"):
        policy.check_members(first_list())


def test_a_site_may_give_no_second_update_for_what_it_has_revealed_shares_of() -> None:
    LISTED.check_second_update(7)
    with pytest.raises(AttemptRefused, match=r"already revealed shares for round 7, .* no second update"):
        replace(LISTED, retrain_after_release=False).check_second_update(7)
    with pytest.raises(AttemptRefused, match="already revealed shares for round 7 of run 'first',"):
        replace(LISTED, retrain_after_release=False).check_second_update(7, "first")
    with pytest.raises(AttemptRefused, match="umbel model init gives the same model each time; pass another --seed"):
        replace(LISTED, retrain_after_release=False).check_second_update(7, "first")


@pytest.mark.parametrize("cohort_change", ["warn", "refuse"])
def test_two_sums_over_one_model_may_not_differ_by_fewer_than_a_sum_may_have(
    cohort_change: Literal["warn", "refuse"],
) -> None:
    """Three, and a third of the ten, or eleven, that were invited: these may work for the coordinator."""
    policy = replace(LISTED, minimum_cohort=3, cohort_change=cohort_change)
    ten = [f"site-{number}" for number in range(10)]
    for near in (ten[1:], ten[2:], [*ten[1:], "site-a"], [*ten, "site-a"], ten[3:], ten[5:]):
        with pytest.raises(AttemptRefused, match="over the same model"):
            check_same_model(policy, ten, near, 10, "round 3 of run 'demo'")
    for allowed in (ten[::-1], ten[6:], [*ten[3:], "site-a", "site-b", "site-c"], [f"site-{name}" for name in "abc"]):
        check_same_model(policy, ten, allowed, 11, "round 3 of run 'demo'")
    with pytest.raises(AttemptRefused, match="over the same model"):
        check_same_model(policy, ten, ten[6:], 12, "round 3 of run 'demo'")


@pytest.mark.parametrize(("policy", "is_refused"), [(LISTED, True), (replace(LISTED, terms_change="warn"), False)])
def test_two_rounds_of_a_run_may_not_be_under_different_terms_unless_enough_of_their_clients_differ(
    policy: SitePolicy, is_refused: bool
) -> None:
    """Four, and a third of those invited, who may work for the coordinator and take off what they sent."""
    policy, ten = replace(policy, minimum_cohort=4), [f"site-{number}" for number in range(10)]
    for n_invited, far in ((2, 4), (3, 5), (10, 7), (11, 7), (12, 8)):
        for near in (ten, ten[1:], ten[far - 1 :]):
            with pytest.raises(AttemptRefused, match="terms_change") if is_refused else nullcontext():
                assert "one site's update" in str(check_terms_change(policy, ten, near, n_invited, "round 3"))
        assert check_terms_change(policy, ten, ten[far:], n_invited, "round 3") is None


def test_only_who_names_a_member_list_refuses_other_terms_without_a_word_of_the_policy() -> None:
    assert LISTED.refuses_terms_change
    assert not SitePolicy().refuses_terms_change
    assert SitePolicy(terms_change="refuse").refuses_terms_change


@given(st.integers(3, 10), st.integers(3, 60), st.data())
def test_what_two_sums_over_one_model_differ_by_is_a_sum_still_when_colluders_are_taken_off(
    minimum: int, n_invited: int, data: st.DataObject
) -> None:
    cohort = [f"site-{number}" for number in range(n_invited)]
    first, second = (data.draw(st.sets(st.sampled_from(cohort))) for _ in range(2))
    policy = replace(LISTED, minimum_cohort=minimum)
    try:
        check_same_model(policy, first, second, n_invited, "round 3 of run 'demo'")
    except AttemptRefused:
        return
    changed = sorted(first ^ second)
    honest = changed[n_invited // 3 :] if changed else changed
    assert not changed or len(honest) >= minimum


def test_two_rounds_that_differ_by_one_client_raise_an_alarm() -> None:
    ten = {f"site-{number}" for number in range(10)}
    for now in (ten - {"site-3"}, ten | {"site-3a"}):
        alarm = check_cohort_change(replace(LISTED, cohort_change="warn"), ten, now, "round 2")
        assert alarm is not None
        assert "the clients of this sum and of round 2 differ only by site-3" in alarm
        with pytest.raises(AttemptRefused, match="differ only by site-3"):
            check_cohort_change(replace(LISTED, cohort_change="refuse"), ten, now, "round 2")


def test_two_rounds_that_differ_by_none_or_by_many_do_not() -> None:
    strict = replace(LISTED, cohort_change="refuse")
    ten = [f"site-{number}" for number in range(10)]
    assert check_cohort_change(strict, ten, list(reversed(ten)), "round 2") is None
    assert check_cohort_change(strict, ten, ten[3:], "round 2") is None


def test_the_count_is_told_only_where_the_policy_shares_it_and_rounds_need_not_be_secure() -> None:
    assert SitePolicy().tells_count
    assert not SitePolicy(share_sample_count=False).tells_count
    assert not replace(LISTED, secure_aggregation="required").tells_count


# --- the file ---


def policy_of(tmp_path: Path, text: str) -> SitePolicy:
    (tmp_path / "policy.toml").write_text(text)
    return read_policy(tmp_path / "policy.toml")


def test_a_file_says_what_holds(tmp_path: Path) -> None:
    policy = policy_of(
        tmp_path,
        f"""
        secure_aggregation = "required"
        members = "lists/pilot.json"
        members_sha256 = "{" ".join(HASH[first : first + 4] for first in range(0, 64, 4)).upper()}"
        members_epoch = 2
        minimum_cohort = 5
        threshold_share = 0.75
        max_parameters = 1_000_000
        retrain_after_release = false
        epsilon = 8
        epsilon_total = 20
        delta = 1e-5
        colluders = 2
        allowed_runs = ["pilot"]
        share_sample_count = false
        cohort_change = "refuse"
        links = "private"
        link_hosts = ["store:9000"]
        minimum_work = 0.5
        weight_max = 2000
        terms_change = "refuse"
        share_metrics = false
        denied_runs = ["pilot-?"]
        other_runs = "members"
        """,
    )
    members = tmp_path / "lists" / "pilot.json"
    assert policy == SitePolicy(
        "required",
        members,
        HASH,
        2,
        5,
        0.75,
        1_000_000,
        False,
        8.0,
        20.0,
        1e-5,
        2,
        ("pilot",),
        False,
        "refuse",
        "private",
        ("store:9000",),
        0.5,
        2000,
        "refuse",
        False,
        ("pilot-?",),
        "members",
    )
    assert len(fields(policy)) == 23, "the file above says every key"


def test_an_empty_file_says_the_defaults(tmp_path: Path) -> None:
    assert policy_of(tmp_path, "") == SitePolicy()


def test_an_absolute_path_stays(tmp_path: Path) -> None:
    assert policy_of(tmp_path, 'members = "/srv/pilot.json"').members == Path("/srv/pilot.json")


UNUSABLE = {
    'secure_agregation = "required"': "unknown key 'secure_agregation' \\(did you mean 'secure_aggregation'\\?\\)",
    "[limits]\nminimum_cohort = 5": "unknown key 'limits'",
    'secure_aggregation = "always"': "secure_aggregation: Input should be 'required' or 'allowed'",
    'secure_aggregation = "required"': 'needs the member list: members = "FILE"',
    f'members_sha256 = "{HASH}"': "need a member list",
    "members_epoch = 2": "need a member list",
    'members = ""': "members must name a file",
    'members = "a"\nmembers_sha256 = "7F3A"': "64 hex digits that `umbel members show` prints",
    'members = "a"\nmembers_epoch = 0': "members_epoch must lie between 1",
    "minimum_cohort = 2": "minimum_cohort must lie between 3 and",
    "minimum_cohort = true": "minimum_cohort: Input should be a valid integer",
    'minimum_cohort = "5"': "minimum_cohort: Input should be a valid integer",
    "minimum_cohort = 5.0": "minimum_cohort: Input should be a valid integer",
    "threshold_share = 0.4": "threshold_share must be at least 0.5",
    "threshold_share = 1.0": "threshold_share must be at least 0.5 and below 1",
    "threshold_share = nan": "threshold_share must be at least 0.5",
    "max_parameters = 0": "max_parameters must lie between",
    "epsilon = 0": "epsilon must lie between",
    "epsilon = inf": "epsilon must lie between",
    "epsilon_total = 0": "epsilon_total must lie between",
    "colluders = -1": "colluders must lie between 0",
    'allowed_runs = ["A run"]': "a run of allowed_runs must be",
    'denied_runs = ["[a-z]"]': "a run of denied_runs must be",
    'other_runs = "members"': 'other_runs = "members" needs the member list',
    'other_runs = "allow"': "other_runs: Input should be",
    'allowed_runs = "pilot"': "allowed_runs: Input should be a valid",
    'links = "all"': "links: Input should be 'none', 'public' or 'private'",
    'link_hosts = ["https://store"]': "link_hosts has 'https://store', which is not a host",
    'link_hosts = ["store:0"]': "link_hosts has 'store:0', which is not a host",
    "link_hosts = [" + '"store", ' * 101 + "]": "link_hosts names 101 hosts; the limit is 100",
    'cohort_change = "ignore"': "cohort_change: Input should be 'warn' or 'refuse'",
    "minimum_cohort = 3\nminimum_cohort = 5": "is not valid TOML",
    "minimum_cohort = 2026-01-01": "does not parse",
    "# " + "x" * (1 << 16): "more than 65536 bytes",
}


@pytest.mark.parametrize(("text", "sentence"), UNUSABLE.items(), ids=[text[:40] for text in UNUSABLE])
def test_an_unusable_file_is_named_with_what_to_write(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as refused:
        policy_of(tmp_path, text)
    assert str(tmp_path / "policy.toml") in str(refused.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="does not parse"):
        read_policy(tmp_path / "policy.toml")


# --- how much of the work, and how many samples ---


def test_a_site_that_says_nothing_of_it_gives_all_of_its_work_or_nothing_where_there_is_no_noise() -> None:
    policy = SitePolicy()
    assert [policy.work_floor(of_run, None) for of_run in (0.0, 0.5, 1.0)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("budget", [{"epsilon": 8.0}, {"epsilon_total": 8.0}, {"epsilon": 8.0, "epsilon_total": 9.0}])
def test_a_site_relies_on_noise_only_if_a_budget_of_its_own_bounds_what_it_costs(budget: dict[str, Any]) -> None:
    """How much noise there is, is the coordinator's choice: next to none would be enough to take the floor away."""
    noise = NoisePlan(2.0**-20, 10**6, 4096, 3)
    counting, trusting = SitePolicy(**budget), SitePolicy()
    assert counting.relies_on(noise)
    assert not counting.relies_on(None)
    assert not trusting.relies_on(noise)
    assert [counting.work_floor(of_run, noise) for of_run in (0.0, 0.5, 1.0)] == [0.0, 0.5, 1.0]
    assert [trusting.work_floor(of_run, noise) for of_run in (0.0, 0.5, 1.0)] == [1.0, 1.0, 1.0]


def test_of_two_floors_the_greater_counts() -> None:
    noise = NoisePlan(100.0, 10**6, 4096, 3)
    for policy in (SitePolicy(minimum_work=0.5), SitePolicy(minimum_work=0.5, epsilon=8.0)):
        for plan in (None, noise):
            assert [policy.work_floor(of_run, plan) for of_run in (0.0, 0.25, 0.75)] == [0.5, 0.5, 0.75]


@pytest.mark.parametrize("share", [0.0, 9.9e-7, 1.000001, math.nan])
def test_a_floor_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="minimum_work must lie between 1e-06 and 1"):
        SitePolicy(minimum_work=share)
    for bound in (1e-6, 1.0):
        assert SitePolicy(minimum_work=bound).minimum_work == bound


@pytest.mark.parametrize("most", [0, (1 << 40) + 1])
def test_a_weight_that_no_site_can_have_is_refused(most: int) -> None:
    with pytest.raises(ValueError, match="weight_max must lie between 1"):
        SitePolicy(weight_max=most)
    for bound in (1, 1 << 40):
        assert SitePolicy(weight_max=bound).weight_max == bound


def test_a_site_counts_its_samples_up_to_its_weight_max() -> None:
    assert [SitePolicy(weight_max=100).samples_that_count(n) for n in (1, 99, 100, 101, 10**9)] == [
        1,
        99,
        100,
        100,
        100,
    ]
    assert SitePolicy().samples_that_count(10**9) == 10**9


@pytest.mark.parametrize(
    ("key", "allowed", "refused"),
    [
        ("members_epoch", (1, 1 << 53), (0, (1 << 53) + 1)),
        ("minimum_cohort", (3,), (2,)),
        ("threshold_share", (0.5, 0.999), (0.499, 1.0)),
        ("max_parameters", (1, 1 << 53), (0, (1 << 53) + 1)),
        ("epsilon", (1e-6, EPSILON_MAX), (0.0, -1.0, 1.001 * EPSILON_MAX, math.inf)),
        ("epsilon_total", (1e-6, EPSILON_MAX), (0.0, -1.0, 1.001 * EPSILON_MAX, math.inf)),
        ("colluders", (0,), (-1,)),
        ("weight_max", (1,), (0,)),
        ("allowed_runs", (("a",) * 1000,), (("a",) * 1001,)),
        ("denied_runs", (("a*",) * 1000,), (("a*",) * 1001,)),
    ],
)
def test_every_limit_has_bounds_of_its_own(key: str, allowed: Sequence[object], refused: Sequence[object]) -> None:
    for value in allowed:
        assert getattr(replace(LISTED, **{key: value}), key) == value  # type: ignore[arg-type]
    for value in refused:
        with pytest.raises(ValueError, match=key):
            replace(LISTED, **{key: value})  # type: ignore[arg-type]
