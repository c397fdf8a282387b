"""How a member list is shown: to programs (`--json`), and to people, who compare fingerprints."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from umbel.aggregation.trust.fingerprint import fingerprint, grouped
from umbel.aggregation.trust.members import MemberList, SignedMembers, require_follows
from umbel.aggregation.trust.public_keys import public_key_bytes
from umbel.client.operator.members_editing import Difference, difference


@dataclass(frozen=True, slots=True)
class ShownKey:
    """A member or an officer."""

    name: str
    public_key: str
    fingerprint: str
    has_signed: bool = False  # only officers sign


@dataclass(frozen=True, slots=True)
class ShownList:
    """A member list as `--json` prints it."""

    name: str
    epoch: int
    sha256: str
    fingerprint: str  # the SHA-256 in groups, to read out
    previous: str
    quorum: int
    members: tuple[ShownKey, ...]
    officers: tuple[ShownKey, ...]
    signed_by: tuple[str, ...]
    concerns: tuple[str, ...]
    changes: tuple[str, ...] = ()  # since the list before, a sentence each


def shown_list(signed: SignedMembers, changes: tuple[str, ...] = ()) -> ShownList:
    members = signed.list
    signers = signed.signers_among(members.officers)
    return ShownList(
        members.name,
        members.epoch,
        members.sha256,
        grouped(members.sha256),
        members.previous,
        members.quorum,
        _keys(members.members),
        _keys(members.officers, signers),
        signers,
        members.concerns(),
        changes,
    )


def _keys(entries: Mapping[str, str], signers: Sequence[str] = ()) -> tuple[ShownKey, ...]:
    return tuple(
        ShownKey(name, key, fingerprint(public_key_bytes(key)), name in signers)
        for name, key in sorted(entries.items())
    )


def signers_in_words(shown: ShownList) -> str:
    who = f" ({', '.join(shown.signed_by)})" if shown.signed_by else ""
    return f"signed by {len(shown.signed_by)} of the {shown.quorum} that must{who}"


def table_of(shown: ShownList) -> Table:
    table = Table("", "name", "fingerprint", "", box=None)
    for kind, keys in (("member", shown.members), ("officer", shown.officers)):
        for key in keys:
            table.add_row(*(Text(cell) for cell in (kind, key.name, key.fingerprint, "signed" * key.has_signed)))
    return table


def changes_of(old: MemberList, new: MemberList) -> tuple[str, ...]:
    """The changes from `old` to `new`, a sentence each."""
    require_follows(old, new)
    members, officers = difference(old, new)
    quorum = [f"quorum: {new.quorum} instead of {old.quorum}"] if new.quorum != old.quorum else []
    return (*_changes_in_words(members, "member"), *_changes_in_words(officers, "officer"), *quorum)


def _changes_in_words(found: Difference, kind: str) -> Iterable[str]:
    yield from (f"{kind} added: {name}" for name in found.added)
    yield from (f"{kind} removed: {name}" for name in found.removed)
    yield from (f"{kind} with another key: {name}" for name in found.rekeyed)
