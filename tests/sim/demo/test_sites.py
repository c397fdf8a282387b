"""The demo's consortium: what its officers sign is what the clinics made, and each clinic trusts just that."""

from pathlib import Path

import pytest

from tests.federations.consortium import public_key
from umbel.aggregation.trust.members import check_first
from umbel.client import read_policy
from umbel.client.policy.members_store import members_in_force
from umbel.client.policy.policy import SitePolicy
from umbel.client.state.state_dir import locked
from umbel.client.state.store import Store
from umbel.sim.demo.client import POLICY_FILE, DemoSite, make_key
from umbel.sim.demo.plan import MINIMUM, RUN, make_plan
from umbel.sim.demo.sites import LIST_FILE, OFFICERS, agree, members_line, pin

KEYS = {name: public_key(name) for name in ("clinic-01", "clinic-02", "clinic-03")}


def site_in(folder: Path, name: str) -> DemoSite:
    return DemoSite(name, str(folder / name), "http://127.0.0.1:8750", RUN, "token", 0.0, has_policy=True)


def test_a_clinic_makes_its_key_at_home_and_has_the_same_when_it_is_started_again(tmp_path: Path) -> None:
    site = site_in(tmp_path, "clinic-01")
    told = make_key(site)
    assert make_key(site) == told
    assert make_key(site_in(tmp_path, "clinic-02")) != told
    with locked(site.state):
        assert Store(site.state, site.server_url).identity(site.name).public_key == told, "it enrols with this one"


def test_all_officers_sign_a_list_of_just_these_keys_and_leave_nothing_to_worry_about(tmp_path: Path) -> None:
    signed = agree(tmp_path / "officers", KEYS)
    assert signed.list.members == KEYS
    assert check_first(signed) == OFFICERS
    assert signed.list.quorum == len(OFFICERS)
    assert signed.list.concerns() == ()
    assert (tmp_path / "officers" / "anna.pem").stat().st_mode & 0o077 == 0


def test_two_clinics_with_one_key_get_no_list(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="have the same key"):
        agree(tmp_path / "officers", {"clinic-01": public_key("one"), "clinic-02": public_key("one")})


def test_a_clinic_takes_the_list_by_its_policy_and_no_plain_round(tmp_path: Path) -> None:
    signed = agree(tmp_path / "officers", KEYS)
    pin(signed, tmp_path)
    policy = read_policy(tmp_path / POLICY_FILE)
    assert policy == SitePolicy(
        "required", tmp_path / LIST_FILE, signed.list.sha256, minimum_cohort=MINIMUM, cohort_change="warn"
    )
    assert members_in_force(policy, tmp_path / "state") == signed.list


def test_a_clinic_sends_part_of_its_work_only_where_its_policy_says_so(tmp_path: Path) -> None:
    pin(agree(tmp_path / "officers", KEYS), tmp_path, 0.1)
    assert read_policy(tmp_path / POLICY_FILE).minimum_work == 0.1


def test_no_policy_of_a_clinic_asks_for_more_than_the_run_gives() -> None:
    for calm in (True, False):
        run_file = make_plan(0, 24, calm=calm).run_file
        assert min(run_file.round_plan(number, 1).minimum for number in range(1, 25)) >= MINIMUM


def test_what_is_told_has_the_hash_as_it_is_compared() -> None:
    assert members_line(12, "07f5be6f" * 8).startswith("12 keys on a list that 2 officers signed")
    assert members_line(12, "07f5be6f" * 8).endswith(" ".join(["07F5 BE6F"] * 8))
