"""The member lists that this site trusts, pinned in its state directory. A coordinator cannot change them.

```
<state>/members/<list>.json     the newest accepted list with its signatures; <list>: its name
```

The pins are outside the coordinators' directories: a coordinator at another address must not begin a new list.

| a list | is accepted if |
|---|---|
| the first of its name | it has the hash that this site's policy names, or a person confirms it |
| the pinned list again | always: nothing changes |
| the next epoch | officers of the pinned list have signed it (`check_successor`) |
| a later epoch | it has the hash that the policy names |
| an earlier epoch, or a different list of the same epoch | never |
"""

from pathlib import Path

from umbel.aggregation.trust.members import (
    FILE_BYTES_MAX,
    MemberList,
    MembersRefused,
    NotTheSuccessor,
    SignedMembers,
    check_first,
    check_successor,
    members_bytes,
    read_members,
)
from umbel.aggregation.trust.public_keys import grouped, short_groups
from umbel.client.errors import StateError
from umbel.client.files import locked_file, make_private, write_atomically
from umbel.client.policy.policy import SitePolicy

_SIGNATURES = b'"signatures"'  # the last key of a list's file: without it, this is another file, or its end is missing


class NotConfirmed(MembersRefused):
    """The first list of its name, which no person has confirmed."""


def read_members_file(path: Path) -> SignedMembers:
    """Read a member list without checking signatures. Raises `OSError`, or `MembersRefused`, which names the file."""
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    try:
        return read_members(data)
    except MembersRefused as error:
        what_to_do = "" if _SIGNATURES in data else "; name the whole member list, a file that `umbel members new` made"
        raise MembersRefused(f"{path}: {error}{what_to_do}") from error


def members_in_force(policy: SitePolicy, state_dir: Path, is_confirmed: bool = False) -> MemberList | None:
    """The list that this site's policy names, accepted by the rules above; None if it names none.

    Only for the holder of the state directory's lock. Raises `MembersRefused`, also for an unreadable file,
    `WorkRefused` for a list older than the policy accepts, `StateError`, `OSError`.
    """
    if policy.members is None:
        return None
    shown, store = _shown(policy.members), MembersStore(state_dir)
    pin = store.pinned(shown.list.name)
    if pin is not None and shown.list.epoch < pin.list.epoch:
        raise NotTheSuccessor(
            f"{policy.members} is epoch {shown.list.epoch} of the member list {shown.list.name!r}, but "
            f"this site trusts epoch {pin.list.epoch} ({short_groups(pin.list.sha256)}) and does not go back to an "
            'older one: name the file of the newer epoch in the policy, members = "FILE"'
        )
    policy.check_members(shown.list)
    return store.take(shown, policy.members_sha256, is_confirmed).list


def _shown(path: Path) -> SignedMembers:
    try:
        return read_members_file(path)
    except OSError as error:
        raise MembersRefused(
            f"the policy's key members names the file {path}, which cannot be read: {error.strerror or error}. Name "
            'the file that holds the member list, members = "FILE"'
        ) from error


class MembersStore:
    """The pins of one state directory. Only for the holder of its lock."""

    def __init__(self, state_dir: Path) -> None:
        self._root = make_private(state_dir / "members")
        self._lock = state_dir / "members.lock"

    def pinned(self, name: str) -> SignedMembers | None:
        """The pinned list of this name; None if there is none. Raises `StateError` if it is damaged."""
        path = self._path(name)
        if not path.exists():
            return None
        try:
            signed = read_members_file(path)
        except (OSError, MembersRefused) as error:
            raise StateError(
                f"{path} is damaged; compare the list's hash with an officer again, then remove this file and start "
                "again"
            ) from error
        if signed.list.name != name:
            raise StateError(
                f"{path} holds the list {signed.list.name!r}, not {name!r}; remove this file and start again"
            )
        return signed

    def every(self) -> list[MemberList]:
        """All pinned lists, sorted by name. Raises `StateError` if one is damaged."""
        pins = (self.pinned(path.stem) for path in sorted(self._root.glob("*.json")))
        return [pin.list for pin in pins if pin is not None]

    def take(self, shown: SignedMembers, trusted_sha256: str = "", is_confirmed: bool = False) -> SignedMembers:
        """Pin this list, by the rules above; returns the pinned list.

        `trusted_sha256`: the hash that the policy names. `is_confirmed`: a person compared the hash, which counts only
        for the first list. Raises `MembersRefused`, `StateError`; then nothing has changed. Processes of one site may
        call it at the same time.
        """
        with locked_file(self._lock):
            return self._take(shown, trusted_sha256, is_confirmed)

    def _take(self, shown: SignedMembers, trusted_sha256: str, is_confirmed: bool) -> SignedMembers:
        pin = self.pinned(shown.list.name)
        if pin is not None and pin.list.sha256 == shown.list.sha256:
            return pin
        if pin is not None:
            _require_later(pin.list, shown.list)
        if trusted_sha256 and shown.list.sha256 == trusted_sha256:
            check_first(shown)
        elif pin is not None:
            _check_next(pin.list, shown)
        else:
            _check_confirmed(shown, trusted_sha256, is_confirmed)
        write_atomically(self._path(shown.list.name), members_bytes(shown))
        return shown

    def _path(self, name: str) -> Path:
        return self._root / f"{name}.json"


def _require_later(pinned: MemberList, shown: MemberList) -> None:
    if shown.epoch < pinned.epoch:
        raise NotTheSuccessor(
            f"this site trusts epoch {pinned.epoch} of {pinned.name!r} and does not go back to epoch {shown.epoch}: "
            "ask the officers for the newest list"
        )
    if shown.epoch == pinned.epoch:
        raise NotTheSuccessor(
            f"this site trusts another list as epoch {pinned.epoch} of {pinned.name!r}. Two lists of the same epoch "
            "are a mistake of the officers, or an attack: ask the officers"
        )


def _check_next(pinned: MemberList, shown: SignedMembers) -> None:
    if shown.list.epoch > pinned.epoch + 1:
        raise NotTheSuccessor(
            f"this site trusts epoch {pinned.epoch} of {pinned.name!r} and has not seen every epoch before "
            f"{shown.list.epoch}. Trust the missing epochs in their order (`umbel members trust`). Or ask an officer "
            "to confirm the hash of this one, and write it into the policy: "
            f'members_sha256 = "{shown.list.sha256}"'
        )
    check_successor(pinned, shown)


def _check_confirmed(shown: SignedMembers, trusted_sha256: str, is_confirmed: bool) -> None:
    """Raise unless a person confirmed the first list. Confirmation cannot override a policy that names another."""
    check_first(shown)
    if trusted_sha256:
        raise NotConfirmed(
            f"the policy's members_sha256 names another member list ({short_groups(trusted_sha256)}) than "
            f"{shown.list.words}. Ask an officer which list is right. If it is this one, write into the policy "
            f'members_sha256 = "{shown.list.sha256}"'
        )
    if not is_confirmed:
        raise NotConfirmed(
            f"this site has not seen the member list {shown.list.name!r} ({grouped(shown.list.sha256)}) before. "
            "Compare its hash with an officer, by telephone or in person. Then write the hash into the policy as "
            "members_sha256, or confirm the list with `umbel members trust`"
        )
