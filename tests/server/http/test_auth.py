"""The operator's key, and bodies that must be what was signed."""

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from umbel.server.http.auth import read_body, require_admin
from umbel.server.problems import Refused
from umbel.server.store.keys import AdminKey, UnfitAdminKey

KEY = "k" * 32


def key_file(tmp_path: Path, key: str, mode: int = 0o600) -> Path:
    path = tmp_path / "admin.key"
    path.write_text(key)
    path.chmod(mode)
    return path


def test_the_first_start_makes_a_key_that_only_its_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "admin.key"
    made = AdminKey.load(path)
    assert path.stat().st_mode & 0o777 == 0o600
    require_admin(made, f"Bearer {path.read_text().strip()}")
    require_admin(AdminKey.load(path), f"Bearer {path.read_text().strip()}")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o601, 0o620])
def test_a_key_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UnfitAdminKey, match="other users of this machine can read"):
        AdminKey.load(key_file(tmp_path, KEY, mode))


def test_a_key_has_at_least_32_characters(tmp_path: Path) -> None:
    AdminKey.load(key_file(tmp_path, f"{KEY}\n"))
    with pytest.raises(UnfitAdminKey, match="has 31 characters, and needs at least 32"):
        AdminKey.load(key_file(tmp_path, f"{KEY[1:]}\n"))


@pytest.mark.parametrize("given", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY} "])
def test_the_key_as_a_bearer_token_lets_an_operator_in(tmp_path: Path, given: str) -> None:
    require_admin(AdminKey.load(key_file(tmp_path, KEY)), given)


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer ", KEY, f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[1:]}"]
)
def test_anything_else_lets_nobody_in(tmp_path: Path, given: str | None) -> None:
    with pytest.raises(Refused) as refusal:
        require_admin(AdminKey.load(key_file(tmp_path, KEY)), given)
    assert refusal.value.kind == "admin-key-refused"


def test_an_empty_key_is_not_the_hash_of_nothing() -> None:
    with pytest.raises(Refused):
        require_admin(AdminKey(hashlib.sha256(b"").digest()), "Bearer ")


def test_two_keys_have_different_fingerprints_and_one_key_another_for_each_deployment(tmp_path: Path) -> None:
    one, other = AdminKey(b"1" * 32), AdminKey(b"2" * 32)
    assert one.fingerprint("a") == AdminKey(b"1" * 32).fingerprint("a")
    assert len({one.fingerprint("a"), other.fingerprint("a"), one.fingerprint("b")}) == 3


def body_of(pieces: Sequence[bytes], sha256: bytes) -> bytes:
    waiting: list[dict[str, Any]] = [
        {"type": "http.request", "body": piece, "more_body": number + 1 < len(pieces)}
        for number, piece in enumerate(pieces)
    ]

    async def receive() -> Any:
        return waiting.pop(0)

    return asyncio.run(read_body(Request({"type": "http", "method": "PUT", "headers": []}, receive), sha256))


@pytest.mark.parametrize("pieces", [[b"whole"], [b"wh", b"ole"], [b"", b"whole"], [b"w", b"", b"hole"]])
def test_a_body_is_what_was_signed_in_however_many_pieces_it_comes(pieces: Sequence[bytes]) -> None:
    assert body_of(pieces, hashlib.sha256(b"whole").digest()) == b"whole"
    with pytest.raises(Refused) as refusal:
        body_of(pieces, hashlib.sha256(b"other").digest())
    assert refusal.value.kind == "wrong-digest"
