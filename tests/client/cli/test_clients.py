"""`umbel client`: what the operator sees of the enrolled clients, and removing one."""

import json

import pytest
import typer
from typer.testing import CliRunner

from tests.client.cli.answers import operator_that_hears
from umbel.client.cli.clients import client_app, list_clients, remove_client
from umbel.client.operator.operator import EnrolledClient

CLIENTS = (
    EnrolledClient("north", {"tier": "ward", "side": "n"}, {"tier": "ward"}, True, 1.7e9, 1.7e9 + 60, None),
    EnrolledClient("south", {"tier": "gold"}, {}, False, 1.7e9, 1.7e9 + 90, 1.7e9 + 100),
)


def test_the_list_tells_what_each_clients_token_says_from_what_it_says_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    list_clients(operator_that_hears({"GET /clients": CLIENTS}), as_json=False)
    header, north, south = capsys.readouterr().out.splitlines()
    columns = [header.index(word) for word in ("client", "token binds", "client's own labels", "enrolled", "last seen")]
    assert columns == sorted(columns)
    _, token, own, *_ = columns
    assert north.split()[:4] == ["north", "name", "tier=ward", "side=n"]
    assert (north.index("name"), north.index("side=n")) == (token, own)
    assert south.index("tier=gold") == own
    assert "removed" not in north
    assert north.count("2023-11-1") == 2
    assert "removed 2023-11-1" in south


def test_an_empty_list_says_what_to_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    list_clients(operator_that_hears({"GET /clients": ()}), as_json=False)
    assert "umbel token create" in capsys.readouterr().out
    list_clients(operator_that_hears({"GET /clients": ()}), as_json=True)
    assert json.loads(capsys.readouterr().out) == []


def test_the_list_for_programs_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    list_clients(operator_that_hears({"GET /clients": CLIENTS}), as_json=True)
    north, south = json.loads(capsys.readouterr().out)
    assert (north["id"], north["revoked_at"], south["revoked_at"]) == ("north", None, 1.7e9 + 100)


def test_removing_a_client_says_that_it_is_refused_now(capsys: pytest.CaptureFixture[str]) -> None:
    asked = list[str]()
    remove_client(operator_that_hears({"DELETE /clients/south": None}, asked), "south", yes=True)
    assert asked == ["DELETE /clients/south"]
    assert "south: removed" in capsys.readouterr().out


@pytest.mark.parametrize("answer", ["n\n", ""])
def test_nobody_is_removed_without_a_yes(answer: str) -> None:
    verb, asked = typer.Typer(), list[str]()
    verb.command()(lambda: remove_client(operator_that_hears({}, asked), "south", yes=False))
    outcome = CliRunner().invoke(verb, [], input=answer)
    assert (outcome.exit_code, asked) == (1, [])
    assert "cannot be undone" in outcome.stderr


def test_a_name_that_no_client_has_is_never_asked_for() -> None:
    arguments = ["remove", "No Slug", "--yes", "--server", "http://127.0.0.1:9"]
    outcome = CliRunner(env={"UMBEL_ADMIN_KEY": "secret"}).invoke(client_app, arguments)
    assert outcome.exit_code == 1
    assert "client must be" in outcome.stderr
