"""`umbel members`: make, sign, check and trust the member list of a consortium. No verb contacts a server."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import hexdigits
from typing import Annotated

import typer

from umbel.aggregation.phrases import counted
from umbel.aggregation.trust.members import MemberList, SignedMembers, check_first, check_successor, require_follows
from umbel.aggregation.trust.public_keys import (
    fingerprint,
    grouped,
    public_key_bytes,
    public_key_text,
    sha256_of_groups,
)
from umbel.client.cli.options import AsJson, Yes
from umbel.client.cli.output import one_sentence_errors, print_json, print_result, print_table
from umbel.client.operator.members_editing import (
    Change,
    edit_file,
    new_file,
    sign_file,
    with_entry,
    without_entry,
)
from umbel.client.policy.members_store import MembersStore, NotConfirmed, read_members_file
from umbel.client.private_keys import make_officer_key
from umbel.client.state.state_dir import STATE_DEFAULT, locked

_STRAY_SHOWN = 10  # characters shown of those that are no hex digits
File = Annotated[Path, typer.Argument(metavar="FILE", help="The member list.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The name in the list.")]
Key = Annotated[str, typer.Argument(metavar="KEY", help="The public key: base64 of its 32 bytes.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="The file for the next epoch; needed if FILE is signed. FILE then stays unchanged."),
]
Quorum = Annotated[
    int | None, typer.Option("--quorum", min=1, help="How many officers must sign lists from this epoch on.")
]
Previous = Annotated[
    Path | None, typer.Option("--previous", metavar="FILE", help="The list of the epoch before this one.")
]

members_app = typer.Typer(no_args_is_help=True)


@dataclass(frozen=True, slots=True)
class ShownKey:
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


def _verb(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a function to the group as the verb `name`. Its errors become one sentence and exit status 1."""
    return lambda action: members_app.command(name)(one_sentence_errors()(action))


@_verb("new")
def new_list(
    name: Annotated[str, typer.Option("--name", help="The consortium, such as pilot.")],
    quorum: Annotated[int, typer.Option("--quorum", min=1, help="How many officers must sign each list.")],
    out: Annotated[Path, typer.Option("--out", help="Where to write it.")],
    as_json: AsJson = False,
) -> None:
    """Begin a member list: the first epoch, empty and unsigned."""
    _print_summary(new_file(out, MemberList(name, 1, {}, {}, quorum)), out, as_json)


@_verb("officer-key")
def officer_key(
    out: Annotated[
        Path, typer.Option("--out", help="Where to write the private key; an existing file is not overwritten.")
    ],
    passphrase: Annotated[
        bool, typer.Option("--passphrase", help="Ask for a passphrase, and encrypt the file with it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make an officer's private key, and print its public key. Keep the file on the officer's own machine."""
    words = typer.prompt("Passphrase", hide_input=True, confirmation_prompt=True, err=True) if passphrase else ""
    raw = make_officer_key(out, words).public_key().public_bytes_raw()
    made = {"file": str(out), "public_key": public_key_text(raw), "fingerprint": fingerprint(raw)}
    print_result(made, f"public key   {made['public_key']}\nfingerprint  {made['fingerprint']}", as_json)


@_verb("add")
def add_member(file: File, name: Name, key: Key, out: Out = None, as_json: AsJson = False) -> None:
    """Add a client with its public key (`umbel fingerprint` prints it)."""
    _edit(file, out, with_entry("members", name, key), None, as_json)


@_verb("add-officer")
def add_officer(
    file: File, name: Name, key: Key, quorum: Quorum = None, out: Out = None, as_json: AsJson = False
) -> None:
    """Add an officer with the public key that `umbel members officer-key` printed."""
    _edit(file, out, with_entry("officers", name, key), quorum, as_json)


@_verb("remove")
def remove_member(file: File, name: Name, out: Out = None, as_json: AsJson = False) -> None:
    """Remove a client. Sites no longer trust its key once officers have signed the next epoch and the sites have it."""
    _edit(file, out, without_entry("members", name), None, as_json)


@_verb("remove-officer")
def remove_officer(file: File, name: Name, quorum: Quorum = None, out: Out = None, as_json: AsJson = False) -> None:
    """Remove an officer."""
    _edit(file, out, without_entry("officers", name), quorum, as_json)


@_verb("sign")
def sign_list(
    file: File,
    key: Annotated[Path, typer.Option("--key", metavar="OFFICERKEY", help="The officer's private key file.")],
    previous: Previous = None,
    as_json: AsJson = False,
) -> None:
    """Sign a list with an officer's key. Look at the list first: `umbel members show FILE --previous OLD`."""
    _print_summary(sign_file(file, key, _ask_passphrase, _previous(previous)), file, as_json)


@_verb("show")
def show_list(file: File, previous: Previous = None, as_json: AsJson = False) -> None:
    """Show a list: names and fingerprints, epoch and hash, signatures, and changes since the list before."""
    signed, old = read_members_file(file), _previous(previous)
    changes = () if old is None else _changes(old, signed.list)
    shown = _shown(signed, changes)
    if as_json:
        print_json(shown)
        return
    typer.echo(f"{shown.name}, epoch {shown.epoch}: {_signers_in_words(shown)}")
    typer.echo(f"SHA-256  {shown.sha256}\n         {shown.fingerprint}")
    parts = (("member", shown.members), ("officer", shown.officers))
    rows = [(kind, key.name, key.fingerprint, "signed" * key.has_signed) for kind, keys in parts for key in keys]
    print_table(("", "name", "fingerprint", ""), rows)
    for line in changes:
        typer.echo(line)
    for concern in shown.concerns:
        typer.echo(f"careful: {concern}", err=True)


@_verb("verify")
def verify_list(file: File, previous: Previous = None, as_json: AsJson = False) -> None:
    """Check that enough of the list's officers have signed it. With --previous, also enough officers of the epoch
    before."""
    signed, old = read_members_file(file), _previous(previous)
    signers = check_first(signed) if old is None else check_successor(old, signed)
    members, follows = signed.list, None if old is None else old.epoch
    groups = grouped(members.sha256)
    if as_json:
        facts = {"name": members.name, "epoch": members.epoch, "sha256": members.sha256, "fingerprint": groups}
        print_json({**facts, "signed_by": signers, "follows": follows})
        return
    whose = "this list" if follows is None else f"epoch {follows}, which it follows"
    found = f"enough officers have signed it: {', '.join(signers)} (officers of {whose})"
    typer.echo(f"{members.name}, epoch {members.epoch}: {found}")
    typer.echo(groups)
    if members.epoch > 1 and follows is None:
        typer.echo("pass --previous FILE to check that this list follows the one that you trust", err=True)


@_verb("trust")
def trust_list(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="One or more lists, the oldest epoch first.")],
    state: Annotated[Path, typer.Option("--state", help="The client's state directory.")] = STATE_DEFAULT,
    sha256: Annotated[
        str,
        typer.Option("--sha256", metavar="HASH", help="The hash that an officer confirmed, with or without spaces."),
    ] = "",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Make this client trust a member list: the first one after you compared its hash with an officer, then each next
    epoch."""
    trusted = _whole_hash(sha256) if sha256 else ""
    with locked(state.expanduser(), "stop that client, run this command again, and then start the client again"):
        store = MembersStore(state.expanduser())
        taken = [_taken(store, read_members_file(file), trusted, yes) for file in files]
    if as_json:
        print_json([_shown(signed) for signed in taken])
        return
    for signed in taken:
        typer.echo(f"trusted from now on: {signed.list.name}, epoch {signed.list.epoch}")
    newest = {signed.list.name: (file, signed.list.epoch) for file, signed in zip(files, taken, strict=True)}
    for file, epoch in newest.values():
        if epoch > 1:
            typer.echo(f'a policy that names an older epoch must name this file now: members = "{file}"', err=True)


def _edit(file: Path, out: Path | None, change: Change, quorum: int | None, as_json: bool) -> None:
    def both(members: MemberList) -> MemberList:
        return change(members) if quorum is None else replace(change(members), quorum=quorum)

    _print_summary(edit_file(file, out, both), out or file, as_json)


def _whole_hash(text: str) -> str:
    """Parse `--sha256`. Raises `ValueError` with the number of characters, because people type the hash in groups."""
    try:
        return sha256_of_groups(text)
    except ValueError as error:
        digits = "".join(text.split())
        others = "".join(sorted({char for char in digits if char not in hexdigits}))
        stray = f" (these are not hex digits: {others[:_STRAY_SHOWN]!r})" if others else ""
        raise ValueError(
            "--sha256 needs the whole hash, 64 hex digits (sixteen groups of four), not "
            f"{counted(len(digits), 'character')}{stray}. Copy all groups that `umbel members show` prints"
        ) from error


def _taken(store: MembersStore, shown: SignedMembers, trusted: str, yes: bool) -> SignedMembers:
    try:
        return store.take(shown, trusted, is_confirmed=yes)
    except NotConfirmed:
        if trusted:
            raise
        question = (
            f"{shown.list.name}: {grouped(shown.list.sha256)}\nDid an officer confirm this hash by phone or in person?"
        )
        typer.confirm(question, abort=True, err=True)
        return store.take(shown, is_confirmed=True)


def _ask_passphrase() -> str:
    return str(typer.prompt("Passphrase", hide_input=True, err=True))


def _previous(path: Path | None) -> MemberList | None:
    return None if path is None else read_members_file(path).list


def _print_summary(signed: SignedMembers, path: Path, as_json: bool) -> None:
    shown = _shown(signed)
    counts = f"{counted(len(shown.members), 'member')}, {counted(len(shown.officers), 'officer')}"
    text = f"{path}: {shown.name}, epoch {shown.epoch}, {counts}, {_signers_in_words(shown)}"
    print_result(shown, text, as_json)


def _shown(signed: SignedMembers, changes: tuple[str, ...] = ()) -> ShownList:
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


def _signers_in_words(shown: ShownList) -> str:
    who = f" ({', '.join(shown.signed_by)})" if shown.signed_by else ""
    return f"signed by {len(shown.signed_by)} of {shown.quorum} required officers{who}"


def _changes(old: MemberList, new: MemberList) -> tuple[str, ...]:
    """The changes from `old` to `new`, a sentence each."""
    require_follows(old, new)
    quorum = [f"quorum: {new.quorum} instead of {old.quorum}"] if new.quorum != old.quorum else []
    members = _changes_in_words(old.members, new.members, "member")
    return (*members, *_changes_in_words(old.officers, new.officers, "officer"), *quorum)


def _changes_in_words(old: Mapping[str, str], new: Mapping[str, str], kind: str) -> Iterable[str]:
    yield from (f"{kind} added: {name}" for name in sorted(new.keys() - old.keys()))
    yield from (f"{kind} removed: {name}" for name in sorted(old.keys() - new.keys()))
    kept = sorted(old.keys() & new.keys())
    yield from (f"{kind} with another key: {name}" for name in kept if old[name] != new[name])
