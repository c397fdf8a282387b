"""Strangers cannot find out who takes part, by words or by work; whoever holds a removed client's key is told so."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from tests.federations.server_device import Device, Json, house, problem

ADDRESS = "/v1/models/" + "0" * 64


@contextmanager
def lookups() -> Generator[list[str]]:
    """The queries of clients' keys that are made meanwhile; not those of who was revoked, twice a second."""
    found = list[str]()

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("SELECT") and "clients.public_key" in statement:
            found.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", note)


@pytest.mark.usefixtures("any_database")
def test_a_name_that_nobody_has_and_one_with_another_key_get_the_same_answer_after_the_same_work(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            known, removed = await it.devices(2)
            await it.http.delete(f"/v1/admin/clients/{removed.name}", headers=it.admin)
            told = list[Json]()
            for was_heard in (False, True):
                if was_heard:
                    await known.send("GET", ADDRESS)
                for name in (known.name, removed.name, "nobody"):
                    with lookups() as made:
                        answer = await Device(it.http, name).send("GET", ADDRESS)
                    assert (problem(answer), answer.status_code, len(made)) == ("bad-signature", 401, 1)
                    body = answer.json()
                    told.append({**body, "detail": body["detail"].replace(name, "NAME")})
            assert told == [told[0]] * 6

    asyncio.run(scenario())


@pytest.mark.usefixtures("any_database")
def test_a_removed_client_is_told_so_after_its_signature_was_verified(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            [device] = await it.devices(1)
            await it.http.delete(f"/v1/admin/clients/{device.name}", headers=it.admin)
            answer = await device.send("GET", ADDRESS)
            assert (problem(answer), answer.status_code) == ("client-removed", 403)
            assert "ask for a new token" in answer.json()["detail"]
        async with house(tmp_path) as it:  # which remembers nothing but what is stored
            device.http = it.http
            assert problem(await device.send("GET", ADDRESS)) == "client-removed"

    asyncio.run(scenario())
