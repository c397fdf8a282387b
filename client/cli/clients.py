"""`umbel client` and `umbel token`: one's own client, enrolled clients, and the tokens that let new ones in."""

from collections.abc import Mapping
from typing import Annotated

import typer

from umbel.aggregation.types import require_slug
from umbel.client.cli.check import check
from umbel.client.cli.options import AsJson, Yes, labels_of, operator_verb
from umbel.client.cli.output import moment, print_json, print_result, print_table
from umbel.client.errors import printable
from umbel.client.operator.operator import EnrolledClient, Operator


def list_clients(operator: Operator, as_json: AsJson = False) -> None:
    """List all enrolled clients. For each client: what its token binds (its name, labels), the labels that it gave
    itself, when it enrolled, when it was last seen, and whether it was removed."""
    clients = operator.clients()
    if as_json:
        print_json(clients)
    elif not clients:
        typer.echo("no client has enrolled yet. Make a token for each (umbel token create), and give it to its site")
    else:
        heads = ("client", "token binds", "client's own labels", "enrolled", "last seen", "")
        print_table(heads, map(_cells, clients))


def remove_client(
    operator: Operator,
    client: Annotated[str, typer.Argument(metavar="NAME", help="The client's name.")],
    yes: Yes = False,
) -> None:
    """Refuse a client from now on. This cannot be undone: its name stays taken, so the client can return only under
    another name."""
    if not yes:
        question = f"Refuse {client} from now on? This cannot be undone, and its name stays taken"
        typer.confirm(question, abort=True, err=True)
    operator.remove_client(client)
    typer.echo(f"{client}: removed; the coordinator refuses it from now on")


def create_tokens(
    operator: Operator,
    count: Annotated[
        int, typer.Option("--count", min=1, max=1000, help="How many tokens to make; each enrols one client.")
    ] = 1,
    ttl_hours: Annotated[
        float, typer.Option("--ttl-hours", min=0.01, help="How many hours the tokens stay valid.")
    ] = 168.0,
    name: Annotated[
        str | None,
        typer.Option("--name", help="The one client name that the token enrols; no other client can take it."),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label", metavar="NAME=VALUE", help="A fact about the clients, such as tier=ward; may be repeated."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make one-time enrolment tokens, and print one per line. Give each to one client. If coverage.sites of a run file
    names a client, its token needs --name. If coverage.tiers names a tier, its clients' tokens need --label tier=..."""
    if name is not None:
        require_slug(name, "--name")
    tokens = operator.create_tokens(count, ttl_hours * 3600, client=name, labels=labels_of(label or ()))
    print_result({"tokens": tokens}, "\n".join(map(printable, tokens)), as_json)


def _cells(client: EnrolledClient) -> tuple[str, ...]:
    own = {name: value for name, value in client.labels.items() if name not in client.bound_labels}
    bound = ("name", *_words(client.bound_labels)) if client.is_name_bound else _words(client.bound_labels)
    removed = "" if client.revoked_at is None else f"removed {moment(client.revoked_at)}"
    heard = moment(client.enrolled_at), moment(client.last_heard_at)
    return client.id, " ".join(bound), " ".join(_words(own)), *heard, removed


def _words(labels: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in sorted(labels.items()))


client_app = typer.Typer(no_args_is_help=True)
client_app.command("check")(check)
client_app.command("list")(operator_verb(list_clients))
client_app.command("remove")(operator_verb(remove_client))
token_app = typer.Typer(no_args_is_help=True)
token_app.callback()(lambda: None)  # without a callback Typer drops the verb's name from a group of one verb
token_app.command("create")(operator_verb(create_tokens))
