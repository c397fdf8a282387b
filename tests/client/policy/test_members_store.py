"""The pinned member list: no trust on first use, no way back, no second list of an epoch, and whole after a kill."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.federations.consortium import OFFICERS, after, first_list, public_key, signed, without
from umbel.aggregation.trust.members import (
    FILE_BYTES_MAX,
    BadOfficerSignature,
    MembersRefused,
    NotTheSuccessor,
    SignedMembers,
    TooFewSignatures,
    members_bytes,
)
from umbel.aggregation.trust.public_keys import grouped
from umbel.client.errors import StateError, WorkRefused
from umbel.client.policy.members_store import MembersStore, NotConfirmed, members_in_force, read_members_file
from umbel.client.policy.policy import SitePolicy

FIRST = signed(first_list(), "anna", "bert")
SECOND = signed(without(FIRST.list, "south"), "anna", "cleo")
THIRD = signed(after(SECOND.list), "bert", "cleo")


@pytest.fixture
def store(tmp_path: Path) -> MembersStore:
    return MembersStore(tmp_path)


def at(store: MembersStore, *lists: SignedMembers) -> MembersStore:
    """A store that has taken these one after another."""
    for shown in lists:
        store.take(shown, is_confirmed=True)
    return store


def require_unchanged(tmp_path: Path, pin: SignedMembers) -> None:
    assert MembersStore(tmp_path).pinned("pilot") == pin


def test_nothing_is_trusted_on_first_use(store: MembersStore) -> None:
    with pytest.raises(NotConfirmed, match="Compare its hash with an officer"):
        store.take(FIRST)
    assert store.pinned("pilot") is None


def test_the_hash_of_the_policy_or_a_person_makes_the_first_list_trusted(tmp_path: Path) -> None:
    assert MembersStore(tmp_path / "a").take(FIRST, FIRST.list.sha256) == FIRST
    assert MembersStore(tmp_path / "b").take(FIRST, is_confirmed=True) == FIRST
    assert MembersStore(tmp_path / "c").take(THIRD, THIRD.list.sha256) == THIRD, "who joins late begins late"
    require_unchanged(tmp_path / "a", FIRST)


def test_a_person_does_not_talk_over_the_policy(store: MembersStore) -> None:
    with pytest.raises(NotConfirmed, match="the policy's members_sha256 names another member list") as refused:
        store.take(FIRST, SECOND.list.sha256, is_confirmed=True)
    assert store.pinned("pilot") is None
    for named in (grouped(SECOND.list.sha256)[:19], grouped(FIRST.list.sha256)[:19]):
        assert f"({named})" in str(refused.value)
    assert f'members_sha256 = "{FIRST.list.sha256}"' in str(refused.value), "a setting, whole"


@pytest.mark.parametrize("names", [(), ("anna",), ("anna", "mallory")])
def test_a_first_list_must_be_signed_however_it_is_confirmed(store: MembersStore, names: tuple[str, ...]) -> None:
    shown = signed(first_list(), *names)
    with pytest.raises(TooFewSignatures):
        store.take(shown, shown.list.sha256)
    with pytest.raises(TooFewSignatures):
        store.take(shown, is_confirmed=True)
    assert store.pinned("pilot") is None


def test_the_next_epoch_is_taken_from_its_officers_without_a_person(store: MembersStore, tmp_path: Path) -> None:
    at(store, FIRST).take(SECOND)
    require_unchanged(tmp_path, SECOND)
    store.take(THIRD, FIRST.list.sha256)
    require_unchanged(tmp_path, THIRD)


def test_the_same_list_again_changes_nothing(store: MembersStore, tmp_path: Path) -> None:
    at(store, FIRST)
    assert store.take(signed(FIRST.list)) == FIRST, "fewer signatures under it make it no other list"
    require_unchanged(tmp_path, FIRST)


REFUSED: dict[str, tuple[SignedMembers, type[Exception]]] = {
    "an older epoch": (FIRST, NotTheSuccessor),
    "the same epoch with other content": (
        signed(replace(SECOND.list, members={"north": public_key("north")}), *OFFICERS),
        NotTheSuccessor,
    ),
    "unsigned": (signed(THIRD.list), TooFewSignatures),
    "signed by too few": (signed(THIRD.list, "anna"), TooFewSignatures),
    "signed by strangers": (signed(THIRD.list, "mallory", "mole"), TooFewSignatures),
    "changed after it was signed": (
        SignedMembers(replace(THIRD.list, members={"mallory": public_key("mallory")}), THIRD.signatures),
        BadOfficerSignature,
    ),
    "an epoch left out": (signed(after(THIRD.list), *OFFICERS), NotTheSuccessor),
    "after another list": (signed(replace(THIRD.list, previous="0" * 64), *OFFICERS), NotTheSuccessor),
}


@pytest.mark.parametrize(("shown", "error"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("is_confirmed", [False, True])
def test_a_pinned_list_gives_way_to_nothing_else(
    store: MembersStore, tmp_path: Path, shown: SignedMembers, error: type[Exception], is_confirmed: bool
) -> None:
    at(store, FIRST, SECOND)
    with pytest.raises(error):
        store.take(shown, is_confirmed=is_confirmed)
    require_unchanged(tmp_path, SECOND)


def test_the_policys_hash_leads_over_epochs_that_were_missed_but_never_back(
    store: MembersStore, tmp_path: Path
) -> None:
    at(store, FIRST)
    with pytest.raises(NotTheSuccessor, match="Trust the missing epochs in their order"):
        store.take(THIRD)
    store.take(THIRD, THIRD.list.sha256)
    for older in (FIRST, SECOND):
        with pytest.raises(NotTheSuccessor, match="does not go back"):
            store.take(older, older.list.sha256)
    require_unchanged(tmp_path, THIRD)


def test_another_list_of_the_pinned_epoch_is_refused_even_if_the_policy_names_it(store: MembersStore) -> None:
    at(store, FIRST)
    other = signed(first_list(sites=("north", "west")), *OFFICERS)
    with pytest.raises(NotTheSuccessor, match="trusts another list as epoch 1"):
        store.take(other, other.list.sha256)


def test_a_list_of_another_name_is_another_first_use(store: MembersStore) -> None:
    at(store, FIRST)
    other = signed(replace(FIRST.list, name="other"), *OFFICERS)
    with pytest.raises(NotConfirmed):
        store.take(other)
    store.take(other, is_confirmed=True)
    assert (store.pinned("pilot"), store.pinned("other")) == (FIRST, other)


@pytest.mark.parametrize("damage", [b"", b"{", members_bytes(FIRST)[:-9], b" " * (FILE_BYTES_MAX + 1)], ids=len)
def test_a_damaged_pin_is_not_a_first_use(store: MembersStore, tmp_path: Path, damage: bytes) -> None:
    at(store, FIRST)
    (tmp_path / "members" / "pilot.json").write_bytes(damage)
    with pytest.raises(StateError, match=r"pilot\.json is damaged; compare the list's hash with an officer again"):
        store.take(FIRST, FIRST.list.sha256)


def test_a_pin_of_another_name_is_refused(store: MembersStore, tmp_path: Path) -> None:
    at(store, FIRST)
    shutil.copy(tmp_path / "members" / "pilot.json", tmp_path / "members" / "other.json")
    with pytest.raises(StateError, match="holds the list 'pilot'"):
        store.pinned("other")


def test_only_its_owner_may_change_the_pin(store: MembersStore, tmp_path: Path) -> None:
    at(store, FIRST)
    assert (tmp_path / "members").stat().st_mode & 0o077 == 0
    assert (tmp_path / "members" / "pilot.json").stat().st_mode & 0o077 == 0


DIES = """
import os, sys
from pathlib import Path
from umbel.client import files
from umbel.client.policy.members_store import MembersStore, read_members_file

step, seen = int(sys.argv[3]), 0

def dying(function, half=None):
    def call(*arguments):
        global seen
        seen += 1
        if seen == step:
            if half is not None:
                half(*arguments)
            os._exit(9)
        return function(*arguments)
    return call

def written_in_part(file):
    file.flush()
    os.truncate(file.fileno(), 99)

files.flush = dying(files.flush, written_in_part)
for name in ("open", "fsync"):
    setattr(files.os, name, dying(getattr(os, name)))
Path.replace = dying(Path.replace)
MembersStore(Path(sys.argv[1])).take(read_members_file(Path(sys.argv[2])))
"""


@pytest.mark.slow
def test_a_kill_at_any_step_leaves_the_old_list_or_the_new(tmp_path: Path) -> None:
    """Steps: locked, made, half written, flushed, renamed; the directory opened, flushed; one that is not reached."""
    shown = tmp_path / "second.json"
    shown.write_bytes(members_bytes(SECOND))
    found, codes = list[SignedMembers | None](), list[int]()
    children = list[tuple[Path, subprocess.Popen[bytes]]]()
    for step in range(1, 9):
        state = tmp_path / str(step)
        at(MembersStore(state), FIRST)
        command = [sys.executable, "-c", DIES, str(state), str(shown), str(step)]
        children.append((state, subprocess.Popen(command, cwd=os.getcwd())))
    for state, child in children:
        codes.append(child.wait(timeout=100))
        found.append(MembersStore(state).pinned("pilot"))
        assert MembersStore(state).take(SECOND) == SECOND, "and the next start takes it"
    assert codes == [9, 9, 9, 9, 9, 9, 9, 0]
    assert found == [FIRST, FIRST, FIRST, FIRST, FIRST, SECOND, SECOND, SECOND]


# --- as the client takes it ---


def test_the_list_that_the_policy_names_is_in_force(tmp_path: Path) -> None:
    (tmp_path / "pilot.json").write_bytes(members_bytes(FIRST))
    policy = SitePolicy(members=tmp_path / "pilot.json")
    with pytest.raises(NotConfirmed):
        members_in_force(policy, tmp_path / "state")
    assert members_in_force(policy, tmp_path / "state", is_confirmed=True) == FIRST.list
    (tmp_path / "pilot.json").write_bytes(members_bytes(SECOND))
    assert members_in_force(policy, tmp_path / "state") == SECOND.list
    with pytest.raises(WorkRefused, match=r"is at epoch 2, .* requires 3 or later"):
        members_in_force(replace(policy, members_epoch=3), tmp_path / "state")
    assert members_in_force(SitePolicy(), tmp_path / "state") is None


def test_a_policy_that_names_an_older_list_than_is_trusted_is_told_which_file_to_name(tmp_path: Path) -> None:
    path = tmp_path / "pilot-1.json"
    path.write_bytes(members_bytes(FIRST))
    at(MembersStore(tmp_path / "state"), FIRST, SECOND)
    with pytest.raises(NotTheSuccessor) as refused:
        members_in_force(SitePolicy(members=path, members_sha256=FIRST.list.sha256), tmp_path / "state")
    assert f"{path} is epoch 1 of the member list 'pilot', but this site trusts epoch 2" in str(refused.value)
    assert 'name the file of the newer epoch in the policy, members = "FILE"' in str(refused.value)
    require_unchanged(tmp_path / "state", SECOND)


def test_a_file_that_is_no_list_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pilot.json"
    path.write_bytes(b" " * (FILE_BYTES_MAX + 1))
    with pytest.raises(MembersRefused, match=r"pilot\.json: this is not a member list: it has more than"):
        read_members_file(path)
