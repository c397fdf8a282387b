"""What `umbel members` and `umbel fingerprint` do and print. What is wrong is one sentence and exit status 1."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import hexdigits

import typer

from umbel.aggregation.phrases import counted
from umbel.aggregation.trust.fingerprint import fingerprint, grouped, sha256_of_groups
from umbel.aggregation.trust.members import MemberList, SignedMembers, check_first, check_successor
from umbel.aggregation.trust.public_keys import public_key_text
from umbel.client.cli.members_view import changes_of, shown_list, signers_in_words, table_of
from umbel.client.cli.output import one_sentence_errors, print_json, screen
from umbel.client.operator.members_editing import (
    Change,
    Part,
    edit_file,
    new_file,
    sign_file,
    with_entry,
    without_entry,
)
from umbel.client.operator.officer_key import make_officer_key
from umbel.client.policy.members_store import MembersStore, NotConfirmed, read_members_file
from umbel.client.state.own_keys import make_own_key, own_keys
from umbel.client.state.state_dir import locked

_STRAY_SHOWN = 10  # of the characters that are no hex digits


@dataclass(frozen=True, slots=True)
class Verified:
    """`follows`: the epoch before, None if that was not asked. `signed_by`: of the officers whose word counts here."""

    name: str
    epoch: int
    sha256: str
    fingerprint: str
    signed_by: tuple[str, ...]
    follows: int | None


@dataclass(frozen=True, slots=True)
class MadeKey:
    file: str
    public_key: str
    fingerprint: str


def new_list(name: str, quorum: int, out: Path, as_json: bool) -> None:
    with one_sentence_errors():
        _tell(new_file(out, MemberList(name, 1, {}, {}, quorum)), out, as_json)


def officer_key(out: Path, with_passphrase: bool, as_json: bool) -> None:
    with one_sentence_errors():
        passphrase = (
            typer.prompt("Passphrase", hide_input=True, confirmation_prompt=True, err=True) if with_passphrase else ""
        )
        raw = make_officer_key(out, passphrase).public_key().public_bytes_raw()
    made = MadeKey(str(out), public_key_text(raw), fingerprint(raw))
    if as_json:
        print_json(made)
    else:
        typer.echo(f"public key   {made.public_key}\nfingerprint  {made.fingerprint}")


def add(part: Part, file: Path, name: str, key: str, quorum: int | None, out: Path | None, as_json: bool) -> None:
    with one_sentence_errors():
        _edit(file, out, with_entry(part, name, key), quorum, as_json)


def remove(part: Part, file: Path, name: str, quorum: int | None, out: Path | None, as_json: bool) -> None:
    with one_sentence_errors():
        _edit(file, out, without_entry(part, name), quorum, as_json)


def sign_list(file: Path, key_file: Path, previous: Path | None, as_json: bool) -> None:
    """An officer of the list, or of the one before. Raises `typer.Exit`."""
    with one_sentence_errors():
        _tell(sign_file(file, key_file, _ask_passphrase, _previous(previous)), file, as_json)


def show_list(file: Path, previous: Path | None, as_json: bool) -> None:
    with one_sentence_errors():
        signed, old = read_members_file(file), _previous(previous)
        changes = () if old is None else changes_of(old, signed.list)
        shown = shown_list(signed, changes)
    if as_json:
        print_json(shown)
        return
    typer.echo(f"{shown.name}, epoch {shown.epoch}: {signers_in_words(shown)}")
    typer.echo(f"SHA-256  {shown.sha256}\n         {shown.fingerprint}")
    screen().print(table_of(shown))
    for line in changes:
        typer.echo(line)
    _warn(shown.concerns)


def verify_list(file: Path, previous: Path | None, as_json: bool) -> None:
    with one_sentence_errors():
        signed, old = read_members_file(file), _previous(previous)
        signers = check_first(signed) if old is None else check_successor(old, signed)
    members, follows = signed.list, None if old is None else old.epoch
    verified = Verified(members.name, members.epoch, members.sha256, grouped(members.sha256), signers, follows)
    if as_json:
        print_json(verified)
        return
    whose = "its own officers" if follows is None else f"the officers of epoch {follows}, which it follows"
    typer.echo(f"{members.name}, epoch {members.epoch}: whole, signed by {', '.join(signers)} of {whose.rstrip(',')}")
    typer.echo(verified.fingerprint)
    if members.epoch > 1 and follows is None:
        typer.echo("whether it follows the list that you trust is checked with --previous", err=True)


def trust_lists(files: Sequence[Path], state: Path, sha256: str, yes: bool, as_json: bool) -> None:
    """Take lists one after another; the first of its name needs its hash, or a person's word."""
    with one_sentence_errors():
        trusted = _whole_hash(sha256) if sha256 else ""
        with locked(state.expanduser(), "stop that client, trust the list, and start it again"):
            store = MembersStore(state.expanduser())
            taken = [_taken(store, read_members_file(file), trusted, yes) for file in files]
    if as_json:
        print_json([shown_list(signed) for signed in taken])
        return
    for signed in taken:
        typer.echo(f"trusted from now on: {signed.list.name}, epoch {signed.list.epoch}")
    newest = {signed.list.name: (file, signed.list.epoch) for file, signed in zip(files, taken, strict=True)}
    for file, epoch in newest.values():
        if epoch > 1:
            typer.echo(f'a policy that names an older epoch must name this file now: members = "{file}"', err=True)


def show_fingerprint(state: Path, server: str | None, as_json: bool) -> None:
    with one_sentence_errors():
        if server is not None:
            make_own_key(state.expanduser(), server)
        keys = own_keys(state.expanduser())
    if as_json:
        print_json(keys)
        return
    for key in keys:
        who = f"{key.client} at {key.server}" if key.client else "not enrolled yet"
        typer.echo(f"{who} ({key.directory})\npublic key   {key.public_key}\nfingerprint  {key.fingerprint}")


def _edit(file: Path, out: Path | None, change: Change, quorum: int | None, as_json: bool) -> None:
    def both(members: MemberList) -> MemberList:
        return change(members) if quorum is None else replace(change(members), quorum=quorum)

    _tell(edit_file(file, out, both), out or file, as_json)


def _whole_hash(text: str) -> str:
    """What `--sha256` says. Raises `ValueError` with how many characters came, for people read them out in groups."""
    try:
        return sha256_of_groups(text)
    except ValueError as error:
        digits = "".join(text.split())
        others = "".join(sorted({char for char in digits if char not in hexdigits}))
        stray = f", among them what is no hex digit: {others[:_STRAY_SHOWN]!r}" if others else ""
        raise ValueError(
            "--sha256 needs the whole hash, 64 hex digits (sixteen groups of four), and "
            f"{counted(len(digits), 'character')} came{stray}: copy all groups that `umbel members show` prints"
        ) from error


def _taken(store: MembersStore, shown: SignedMembers, trusted: str, yes: bool) -> SignedMembers:
    try:
        return store.take(shown, trusted, is_confirmed=yes)
    except NotConfirmed:
        if trusted:
            raise
        question = (
            f"{shown.list.name}: {grouped(shown.list.sha256)}\nHas an officer told you this hash, and not by mail?"
        )
        typer.confirm(question, abort=True, err=True)
        return store.take(shown, is_confirmed=True)


def _ask_passphrase() -> str:
    return str(typer.prompt("Passphrase", hide_input=True, err=True))


def _previous(path: Path | None) -> MemberList | None:
    return None if path is None else read_members_file(path).list


def _tell(signed: SignedMembers, path: Path, as_json: bool) -> None:
    """What a file holds now, in short."""
    shown = shown_list(signed)
    if as_json:
        print_json(shown)
        return
    n_members, n_officers = len(shown.members), len(shown.officers)
    counts = f"{n_members} member{'s' * (n_members != 1)}, {n_officers} officer{'s' * (n_officers != 1)}"
    typer.echo(f"{path}: {shown.name}, epoch {shown.epoch}, {counts}, {signers_in_words(shown)}")


def _warn(concerns: Iterable[str]) -> None:
    for concern in concerns:
        typer.echo(f"careful: {concern}", err=True)
