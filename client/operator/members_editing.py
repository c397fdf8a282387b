"""Edit and sign a member list on an officer's machine.

A list without signatures is changed in place. A signed list never changes; its next epoch goes to another file.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from umbel.aggregation.trust.members import (
    MemberList,
    NotAMember,
    SignedMembers,
    TooFewSignatures,
    check_first,
    members_bytes,
    require_follows,
)
from umbel.aggregation.trust.public_keys import public_key_bytes, public_key_text
from umbel.client.files import write_atomically
from umbel.client.policy.members_store import read_members_file
from umbel.client.private_keys import load_officer_key

Part = Literal["members", "officers"]
Change = Callable[[MemberList], MemberList]


def new_file(path: Path, members: MemberList) -> SignedMembers:
    """Write an unsigned list. Raises `ValueError` if the file exists."""
    if path.exists():
        raise ValueError(f"{path} exists already; name another file")
    return write_members_file(path, SignedMembers(members, {}))


def edit_file(path: Path, out: Path | None, change: Change) -> SignedMembers:
    """Change the list in `path` and write it there, or to `out`, which a signed list's next epoch needs.

    Raises `ValueError` for a signed list without `out`, and for one with some signatures but too few.
    """
    signed = read_members_file(path)
    changed = change(_draft_of(signed))
    if out is not None:
        return new_file(out, changed)
    if signed.signatures:
        raise ValueError(f"{path} is signed and stays unchanged; name a file for the next epoch with --out")
    return write_members_file(path, SignedMembers(changed, {}))


def with_entry(part: Part, name: str, key: str) -> Change:
    text = public_key_text(public_key_bytes(key, f"the key of {name!r}"))

    def change(members: MemberList) -> MemberList:
        if name in _part(members, part):
            raise ValueError(f"{name!r} is on the list already; to give it another key, remove it first")
        return _with_part(members, part, {**_part(members, part), name: text})

    return change


def without_entry(part: Part, name: str) -> Change:
    """A change that removes a name, which must be in the list."""

    def change(members: MemberList) -> MemberList:
        if name not in _part(members, part):
            raise ValueError(f"{name[:63]!r} is not among the {part} of {members.name!r}")
        return _with_part(members, part, {one: key for one, key in _part(members, part).items() if one != name})

    return change


def sign_file(path: Path, key_file: Path, ask: Callable[[], str], previous: MemberList | None = None) -> SignedMembers:
    """Sign the list in `path` with the key of one of its officers, or of an officer of the list before (`previous`).

    `ask`: for the key's passphrase, if it needs one. Raises `ValueError` for a list without members, or with fewer
    officers than its quorum, `NotTheSuccessor`, `NotAMember` if the key belongs to no officer, `BadOfficerSignature`,
    `StateError`, `OSError`; then the file is unchanged.
    """
    signed = read_members_file(path)
    if not signed.list.members:
        raise ValueError(f"{path} has no members, so nobody could take part: add them first (umbel members add)")
    if len(signed.list.officers) < signed.list.quorum:
        raise ValueError(
            f"{path} has fewer officers ({len(signed.list.officers)}) than must sign it ({signed.list.quorum}): add "
            "officers first (umbel members add-officer)"
        )
    if previous is not None:
        require_follows(previous, signed.list)
    key = load_officer_key(key_file, ask)
    text = public_key_text(key.public_key().public_bytes_raw())
    officers = {*signed.list.officers.values(), *(previous.officers.values() if previous is not None else ())}
    if text not in officers:
        raise NotAMember(
            f"{key_file} is not the key of an officer on {path}. If it is the key of an officer of the epoch before, "
            "name that epoch's list with --previous"
        )
    after = signed.signed_with(key)
    after.signers_among(signed.list.officers)  # raises for other signatures that do not verify
    return write_members_file(path, after)


def write_members_file(path: Path, signed: SignedMembers) -> SignedMembers:
    write_atomically(path, members_bytes(signed))
    return signed


def _draft_of(signed: SignedMembers) -> MemberList:
    """The list to change: this one if it is unsigned, else its next epoch."""
    if not signed.signatures:
        return signed.list
    try:
        check_first(signed)
    except TooFewSignatures as error:
        raise ValueError(
            f"{error}. A list with some signatures cannot be changed, because then two lists of the same epoch could "
            "become valid. Once enough officers have signed it, make the next epoch with --out"
        ) from error
    return replace(signed.list, epoch=signed.list.epoch + 1, previous=signed.list.sha256)


def _part(members: MemberList, part: Part) -> Mapping[str, str]:
    return members.members if part == "members" else members.officers


def _with_part(members: MemberList, part: Part, entries: Mapping[str, str]) -> MemberList:
    return replace(members, members=entries) if part == "members" else replace(members, officers=entries)
