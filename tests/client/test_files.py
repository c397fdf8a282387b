"""The state directory is its owner's alone: closed to others, and refused where another user could exchange it."""

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from umbel.client.errors import StateError
from umbel.client.files import make_private, write_atomically
from umbel.client.private_keys import load_or_make_key
from umbel.client.state.state_dir import locked
from umbel.client.state.store import Store

SERVER = "http://127.0.0.1:8750"


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    """What is private here is so by itself, not by the umask that the tests happen to run with."""
    before = os.umask(0)
    yield
    os.umask(before)


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a path belong to another user than this process's: by its owner if we may, else by who we are."""
    if os.geteuid() == 0:
        os.chown(path, 4711, -1, follow_symlinks=False)
    else:
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_directory_is_its_owners_alone(tmp_path: Path) -> None:
    assert mode_of(make_private(tmp_path / "state")) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777, 0o701])
def test_a_directory_that_others_may_enter_is_closed_to_them(tmp_path: Path, mode: int) -> None:
    (tmp_path / "state").mkdir(mode=mode)
    assert mode_of(make_private(tmp_path / "state")) == 0o700


@pytest.mark.parametrize(("mode", "is_said"), [(0o755, False), (0o775, True), (0o757, True)])
def test_that_others_could_write_into_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_said: bool
) -> None:
    (tmp_path / "state").mkdir(mode=mode)
    with caplog.at_level(logging.WARNING, "umbel.client"):
        make_private(tmp_path / "state")
    assert ("other users could write into" in caplog.text) is is_said


def test_a_directory_of_another_user_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    give_away(tmp_path / "state", monkeypatch)
    with pytest.raises(StateError, match=r"belongs to user \d+, .*--state"):
        make_private(tmp_path / "state")


def test_a_file_that_another_user_has_put_into_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a member list of its own, from the time when the directory was open to all."""
    pins = tmp_path / "members"
    pins.mkdir(mode=0o777)
    (pins / "pilot.json").write_text("{}")
    give_away(pins / "pilot.json", monkeypatch)
    with pytest.raises(StateError, match="belongs to user"):
        make_private(pins)


def test_a_link_of_ones_own_to_another_disk_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o755)
    (tmp_path / "state").symlink_to(tmp_path / "disk")
    make_private(tmp_path / "state")
    assert mode_of(tmp_path / "disk") == 0o700


def test_a_link_that_another_user_has_laid_is_refused_and_what_it_leads_to_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir(mode=0o755)
    (tmp_path / "state").symlink_to(tmp_path / "home")
    give_away(tmp_path / "state", monkeypatch)
    with pytest.raises(StateError, match="belongs to user"):
        make_private(tmp_path / "state")
    assert mode_of(tmp_path / "home") == 0o755


def test_a_directory_that_all_users_share_is_not_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    with pytest.raises(StateError, match=r"shared by all users.*name a directory inside it"):
        make_private(tmp_path / "tmp")
    assert mode_of(tmp_path / "tmp") == 0o1777


def test_a_directory_that_cannot_be_closed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that knows no modes."""

    def chmod(path: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    (tmp_path / "state").mkdir(mode=0o755)
    monkeypatch.setattr(Path, "chmod", chmod)
    with pytest.raises(StateError, match=r"its mode cannot be changed \(Operation not permitted\): run `chmod 700"):
        make_private(tmp_path / "state")


def test_a_system_without_owners_of_files_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "geteuid")
    (tmp_path / "state").mkdir(mode=0o755)
    make_private(tmp_path / "state")
    load_or_make_key(tmp_path / "state" / "key.pem")
    load_or_make_key(tmp_path / "state" / "key.pem")
    assert mode_of(tmp_path / "state") == 0o755


def test_every_directory_of_a_client_is_closed_at_its_start(tmp_path: Path) -> None:
    with locked(tmp_path / "state"):
        Store(tmp_path / "state", SERVER)
    folders = [tmp_path / "state", *(path for path in (tmp_path / "state").rglob("*") if path.is_dir())]
    assert len(folders) > 3
    for folder in folders:
        folder.chmod(0o755)
    with locked(tmp_path / "state"):
        Store(tmp_path / "state", SERVER)
    assert {mode_of(folder) for folder in folders} == {0o700}


def test_a_file_is_written_anew_though_somebody_has_laid_one_in_its_place(tmp_path: Path) -> None:
    """What is open in another process's hands, or may be read by others, would stay so."""
    (tmp_path / "key.pem.tmp").write_text("mine")
    (tmp_path / "key.pem.tmp").chmod(0o666)
    with (tmp_path / "key.pem.tmp").open("r+") as theirs:
        write_atomically(tmp_path / "key.pem", b"secret")
        assert theirs.read() == "mine"
    assert mode_of(tmp_path / "key.pem") == 0o600


# --- the key ---


def test_a_key_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    made = load_or_make_key(tmp_path / "key.pem")
    assert mode_of(tmp_path / "key.pem") == 0o600
    assert load_or_make_key(tmp_path / "key.pem").private_bytes_raw() == made.private_bytes_raw()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_key_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    load_or_make_key(tmp_path / "key.pem")
    (tmp_path / "key.pem").chmod(mode)
    with pytest.raises(StateError, match="chmod 600"):
        load_or_make_key(tmp_path / "key.pem")


def test_a_key_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_or_make_key(tmp_path / "key.pem")
    give_away(tmp_path / "key.pem", monkeypatch)
    with pytest.raises(StateError, match="belongs to user"):
        load_or_make_key(tmp_path / "key.pem")
