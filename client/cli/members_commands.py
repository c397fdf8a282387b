"""The command line's verbs for whom a site trusts (`members`, `fingerprint`): flags and help; none asks a server.

What they do is in `members_console.py`, which is imported only when a verb runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from umbel.client.cli.flags import SERVER_METAVAR, SERVER_VARIABLE, AsJson, Yes

File = Annotated[Path, typer.Argument(metavar="FILE", help="The member list.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="As it stands in the list.")]
Key = Annotated[str, typer.Argument(metavar="KEY", help="The public key: base64 of its 32 bytes.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="Where to write the next epoch, if FILE is signed; it stays as it is."),
]
Quorum = Annotated[int | None, typer.Option("--quorum", min=1, help="From then on so many officers must sign.")]
Previous = Annotated[Path | None, typer.Option("--previous", metavar="FILE", help="The list of the epoch before.")]
State = Annotated[Path, typer.Option("--state", help="The client's state directory.")]

members_app = typer.Typer(
    help="The member list of a consortium: whose keys a site believes. Made, signed and checked offline.",
    no_args_is_help=True,
)


@members_app.command("new")
def new_list(
    name: Annotated[str, typer.Option("--name", help="The consortium, such as pilot.")],
    quorum: Annotated[int, typer.Option("--quorum", min=1, help="How many officers must sign each list.")],
    out: Annotated[Path, typer.Option("--out", help="Where to write it.")],
    as_json: AsJson = False,
) -> None:
    """Begin a member list: the first epoch, empty and unsigned."""
    from umbel.client.cli import members_console

    members_console.new_list(name, quorum, out, as_json)


@members_app.command("officer-key")
def officer_key(
    out: Annotated[Path, typer.Option("--out", help="Where to write the private key; never overwrites.")],
    passphrase: Annotated[bool, typer.Option("--passphrase", help="Ask for one, and encrypt the file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make an officer's key, and print the public one. Keep the file on a machine of the officer's own."""
    from umbel.client.cli import members_console

    members_console.officer_key(out, passphrase, as_json)


@members_app.command("add")
def add_member(file: File, name: Name, key: Key, out: Out = None, as_json: AsJson = False) -> None:
    """Add a client with its public key (`umbel fingerprint` prints it)."""
    from umbel.client.cli import members_console

    members_console.add("members", file, name, key, None, out, as_json)


@members_app.command("add-officer")
def add_officer(
    file: File, name: Name, key: Key, quorum: Quorum = None, out: Out = None, as_json: AsJson = False
) -> None:
    """Add an officer with the public key that `umbel members officer-key` has printed."""
    from umbel.client.cli import members_console

    members_console.add("officers", file, name, key, quorum, out, as_json)


@members_app.command("remove")
def remove_member(file: File, name: Name, out: Out = None, as_json: AsJson = False) -> None:
    """Remove a client: once the next epoch is signed and taken, no site believes its key any more."""
    from umbel.client.cli import members_console

    members_console.remove("members", file, name, None, out, as_json)


@members_app.command("remove-officer")
def remove_officer(file: File, name: Name, quorum: Quorum = None, out: Out = None, as_json: AsJson = False) -> None:
    """Remove an officer."""
    from umbel.client.cli import members_console

    members_console.remove("officers", file, name, quorum, out, as_json)


@members_app.command("sign")
def sign_list(
    file: File,
    key: Annotated[Path, typer.Option("--key", metavar="OFFICERKEY", help="The officer's private key file.")],
    previous: Previous = None,
    as_json: AsJson = False,
) -> None:
    """Put an officer's signature under a list. Look at it first: `umbel members show FILE --previous OLD`."""
    from umbel.client.cli import members_console

    members_console.sign_list(file, key, previous, as_json)


@members_app.command("show")
def show_list(file: File, previous: Previous = None, as_json: AsJson = False) -> None:
    """Who is in a list, with fingerprints; its epoch and hash; who has signed; what it changes of the one before."""
    from umbel.client.cli import members_console

    members_console.show_list(file, previous, as_json)


@members_app.command("verify")
def verify_list(file: File, previous: Previous = None, as_json: AsJson = False) -> None:
    """Check the signatures: by the list's own officers, and with --previous by those of the epoch before."""
    from umbel.client.cli import members_console

    members_console.verify_list(file, previous, as_json)


@members_app.command("trust")
def trust_list(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Lists, the older epoch first.")],
    state: State = Path("~/.umbel"),
    sha256: Annotated[
        str,
        typer.Option("--sha256", metavar="HASH", help="The hash that an officer has told you, with or without blanks."),
    ] = "",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Let this client believe a list from now on: the first after its hash was compared, then each next epoch."""
    from umbel.client.cli import members_console

    members_console.trust_lists(files, state, sha256, yes, as_json)


def show_fingerprint(
    state: State = Path("~/.umbel"),
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            envvar=SERVER_VARIABLE,
            metavar=SERVER_METAVAR,
            help="Make the key for this coordinator, if it is not there.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """This client's own public key and its fingerprint, to compare with the officers of a member list."""
    from umbel.client.cli import members_console

    members_console.show_fingerprint(state, server, as_json)
