"""The policy is read again when its file or its member list changes, and one that is not valid allows nothing."""

import logging
from pathlib import Path

import pytest

from tests.federations.consortium import OFFICERS, after, first_list, signed
from umbel.aggregation.trust.members import members_bytes
from umbel.client.agent import policy_file
from umbel.client.agent.policy_file import InForce, PolicyFile
from umbel.client.policy.policy import SitePolicy, read_policy

FIRST = first_list()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "site.toml"


def test_a_site_without_a_file_has_no_policy(tmp_path: Path) -> None:
    assert PolicyFile(None, tmp_path).look() == InForce()


def test_a_change_counts_at_the_next_look(path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path.write_text('allowed_runs = ["one"]\n')
    file = PolicyFile(path, tmp_path / "state")
    first = file.look()
    assert first.policy is not None
    assert first.policy.allowed_runs == ("one",)
    assert file.look() is first
    assert not caplog.records
    path.write_text('allowed_runs = ["one", "two"]\n')
    second = file.look()
    assert second.policy is not None
    assert second.policy.allowed_runs == ("one", "two")
    assert [record.message for record in caplog.records] == [f"read the policy again: {path}"]


@pytest.mark.parametrize("text", ["allowed_runs = [", "allowed = []", 'other_runs = "members"'])
def test_what_is_not_valid_allows_nothing_and_is_said_once(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path.write_text("")
    file = PolicyFile(path, tmp_path / "state")
    assert not file.look().trouble
    path.write_text(text)
    for _ in range(3):
        broken = file.look()
        assert (broken.policy, str(path) in broken.trouble) == (None, True)
    [said] = caplog.records
    assert "takes part in no run until its policy is valid again" in said.message
    path.write_text("minimum_cohort = 4\n")
    assert file.look().policy is not None


def test_a_file_that_is_gone_allows_nothing(path: Path, tmp_path: Path) -> None:
    path.write_text("")
    file = PolicyFile(path, tmp_path / "state")
    assert not file.look().trouble
    path.unlink()
    assert "cannot be read: No such file" in file.look().trouble


def test_the_next_epoch_of_the_member_list_counts_at_the_next_look(path: Path, tmp_path: Path) -> None:
    members = tmp_path / "pilot.json"
    members.write_bytes(members_bytes(signed(FIRST, *OFFICERS)))
    path.write_text(f'members = "pilot.json"\nmembers_sha256 = "{FIRST.sha256}"\n')
    file = PolicyFile(path, tmp_path / "state")
    assert file.look().list_sha256 == FIRST.sha256
    second = after(FIRST)
    members.write_bytes(members_bytes(signed(second, *OFFICERS)))
    assert file.look().list_sha256 == second.sha256
    members.write_bytes(b"{}")
    assert "pilot.json" in file.look().trouble


def test_a_member_list_that_is_whole_again_counts_although_the_policy_was_not_touched(
    path: Path, tmp_path: Path
) -> None:
    members, whole = tmp_path / "pilot.json", members_bytes(signed(FIRST, *OFFICERS))
    members.write_bytes(whole)
    path.write_text(f'members = "pilot.json"\nmembers_sha256 = "{FIRST.sha256}"\n')
    file = PolicyFile(path, tmp_path / "state")
    assert not file.look().trouble
    members.write_bytes(whole[:100])  # a copy that is under way
    assert "pilot.json" in file.look().trouble
    members.write_bytes(whole)
    assert file.look().list_sha256 == FIRST.sha256


def test_a_change_while_the_file_is_read_counts_at_the_next_look(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text('allowed_runs = ["one"]\n')

    def read_and_changed(found: Path) -> SitePolicy:
        policy = read_policy(found)
        monkeypatch.undo()
        found.write_text('allowed_runs = ["only-this-one"]\n')
        return policy

    monkeypatch.setattr(policy_file, "read_policy", read_and_changed)
    file = PolicyFile(path, tmp_path / "state")
    file.look()
    assert (policy := file.look().policy) is not None
    assert policy.allowed_runs == ("only-this-one",)
