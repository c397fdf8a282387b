"""`umbel client`: who has enrolled, and who no longer may speak."""

from collections.abc import Mapping

import typer
from rich.table import Table
from rich.text import Text

from umbel.client.cli.output import print_json, screen
from umbel.client.cli.tables import moment
from umbel.client.operator.operator import EnrolledClient, Operator
from umbel.client.printable import printable


def list_clients(operator: Operator, as_json: bool) -> None:
    clients = operator.clients()
    if as_json:
        print_json(clients)
        return
    table = Table("client", "by its token", "by its own word", "enrolled", "last heard", "", box=None)
    for client in clients:
        table.add_row(*(Text(printable(cell)) for cell in _cells(client)))
    screen().print(table)


def remove_client(operator: Operator, client: str, yes: bool) -> None:
    if not yes:
        question = f"Refuse {client} from now on? This cannot be undone, and its name stays taken"
        typer.confirm(question, abort=True, err=True)
    operator.remove_client(client)
    typer.echo(f"{client}: removed; the coordinator refuses it from now on")


def _cells(client: EnrolledClient) -> tuple[str, ...]:
    own = {name: value for name, value in client.labels.items() if name not in client.bound_labels}
    bound = ("name", *_words(client.bound_labels)) if client.is_name_bound else _words(client.bound_labels)
    removed = "" if client.revoked_at is None else f"removed {moment(client.revoked_at)}"
    heard = moment(client.enrolled_at), moment(client.last_heard_at)
    return client.id, " ".join(bound), " ".join(_words(own)), *heard, removed


def _words(labels: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in sorted(labels.items()))
