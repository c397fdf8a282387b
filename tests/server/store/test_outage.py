"""A database that goes and comes back: clients are told to come again, the log says it in a line, and rounds go on."""

import asyncio
import errno
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from tests.federations.server_device import House, problem, run_file, small_state, update_of
from tests.server.serve.test_process import SERVE
from tests.servers.postgres import Cluster, binaries, cluster
from tests.servers.waits import LIMIT_S, until_told, wait_for_file
from umbel.server.settings import Settings
from umbel.server.store import outage as database_outage
from umbel.server.store.database import Database
from umbel.server.store.outage import DatabaseAway, DatabaseOutage, why_away
from umbel.server.store.replicas import OUTAGE_S

AWAY = "ERROR umbel.server.store.outage: the database does not answer"
BACK = "INFO umbel.server.store.outage: the database answers again after"


@pytest.fixture(scope="module")
def server() -> Generator[Cluster]:
    """A PostgreSQL of this module's own: the others' must not go away."""
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with cluster() as running:
        yield running


@contextmanager
def serving(url: str, data: Path, log: Path) -> Generator[str]:
    """A coordinator's process over this database; its URL."""
    environment = {**os.environ, "UMBEL_DATABASE_URL": url, "UMBEL_BLOBS": str(data / "blobs")}
    command = [sys.executable, "-c", SERVE, "--data", str(data), "--port", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        yield wait_for_file(data / "endpoint", process, log).read_text().strip()
    finally:
        process.terminate()
        assert process.wait(LIMIT_S) == 0


@pytest.mark.nightly
@pytest.mark.slow
def test_a_report_that_comes_while_the_database_is_away_counts_when_it_is_back(server: Cluster, tmp_path: Path) -> None:
    data, log = tmp_path / "data", tmp_path / "log"

    async def scenario(url: str) -> int:
        """Returns how much the log had before the outage: a machine that stands still for seconds causes others."""
        async with httpx.AsyncClient(base_url=url, timeout=60.0) as http:
            it = House(http, Settings(data=data), None)
            layout = await it.begin(run_file(count=2, target=3, minimum=3), small_state())
            devices = await it.devices(3)
            assignments = await asyncio.gather(*(device.work(layout) for device in devices))
            update = update_of(layout, torch.ones(layout.n_values))
            for device, assignment in zip(devices, assignments, strict=True):
                assert (await device.upload(assignment["id"], update)).status_code == 201
            n_before = len(log.read_text())
            server.stop()
            try:
                answers = [
                    await device.report(assignment["id"], update)
                    for _ in range(20)
                    for device, assignment in zip(devices, assignments, strict=True)
                ]
                assert {problem(answer) for answer in answers} == {"database-unavailable"}
                assert {answer.headers["retry-after"] for answer in answers} == {"2"}
                assert problem(await http.get("/v1/admin/clients", headers=it.admin)) == "database-unavailable"
                assert problem(await devices[0].check_in(layout)) == "database-unavailable"

                async def is_said() -> bool:
                    assert problem(await http.get("/v1/admin/clients", headers=it.admin)) == "database-unavailable"
                    return AWAY in log.read_text()[n_before:]

                await until_told("what the log says of the outage", is_said)
                await asyncio.sleep(OUTAGE_S)
            finally:
                server.start()
            for device, assignment in zip(devices, assignments, strict=True):
                while (answer := await device.report(assignment["id"], update)).status_code != 200:
                    assert problem(answer) == "database-unavailable"
                    await asyncio.sleep(0.1)
                assert answer.json()["outcome"] == "accepted"
            assert (await it.ended(1))[0]["reported"] == 3
            await asyncio.gather(*(device.take_part(layout, torch.ones(layout.n_values)) for device in devices))
            assert (await it.ended(2))[1]["committed"]
        return n_before

    with serving(server.new_database(), data, log) as url:
        n_before = asyncio.run(scenario(url))
    said = log.read_text()[n_before:]
    assert "Traceback" not in said, said
    assert said.count(AWAY) == 1, said
    assert said.count(BACK) == 1, said
    assert len(said) < 10_000, said


def test_many_transactions_that_fail_are_one_line_and_so_is_the_return(
    server: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)

    async def ask(database: Database) -> None:
        async with database.reading() as tx:
            await tx.execute(text("SELECT 1"))

    async def scenario() -> None:
        database = Database(server.new_database())
        await ask(database)
        server.stop()
        try:
            told = await asyncio.gather(*(ask(database) for _ in range(50)), return_exceptions=True)
            monkeypatch.setattr(database_outage, "REPEAT_S", 0.0)
            with pytest.raises(DatabaseAway):
                await ask(database)
        finally:
            server.start()
        assert all(isinstance(one, DatabaseAway) for one in told)
        await ask(database)
        await database.close()

    asyncio.run(scenario())
    gone, still, back = (record.getMessage() for record in caplog.records if record.name == database_outage.__name__)
    assert gone.startswith("the database does not answer (")
    assert gone.endswith("(1 transaction failed so far)")
    assert still.endswith("(51 transactions failed so far)")
    assert back.endswith("; 51 transactions failed")


def test_a_database_that_lets_nobody_in_is_away(server: Cluster) -> None:
    async def why(url: str) -> str:
        database = Database(url)
        with pytest.raises(DatabaseAway) as told:
            async with database.reading():
                pass
        await database.close()
        return str(told.value)

    async def scenario() -> None:
        url = server.new_database()
        assert await why(url.replace(f"{server.user}@", "stranger@")) == 'role "stranger" does not exist'
        assert "does not exist" in await why(url.replace("/umbel_", "/no_"))

    asyncio.run(scenario())


def test_what_a_transaction_does_wrong_is_no_outage(server: Cluster) -> None:
    async def scenario() -> None:
        database = Database(server.new_database())
        with pytest.raises(DBAPIError, match="nothing_like_it"):
            async with database.reading() as tx:
                await tx.execute(text("SELECT * FROM nothing_like_it"))
        await database.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('::1', 5432, 0, 0)"), "Connection refused"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (TimeoutError(), "TimeoutError"),
        (ValueError("a mistake"), None),
    ],
)
def test_why_it_is_away_is_said_in_the_systems_words(error: Exception, words: str | None) -> None:
    assert why_away(error) == words


def test_a_database_that_comes_and_goes_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    watched = DatabaseOutage()
    for _ in range(100):
        with pytest.raises(DatabaseAway, match="refused"), watched:
            raise ConnectionRefusedError("refused")
        with watched:
            pass
    assert len(caplog.records) == 2


def test_an_outage_soon_after_another_is_logged_when_it_lasts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    watched = DatabaseOutage()

    def fail() -> None:
        with pytest.raises(DatabaseAway), watched:
            raise ConnectionRefusedError("refused")

    fail()
    with watched:
        pass
    fail()
    assert len(caplog.records) == 2
    monkeypatch.setattr(database_outage, "_NEW_OUTAGE_S", 0.0)
    fail()
    with watched:
        pass
    gone, back = (record.getMessage() for record in caplog.records[2:])
    assert gone.endswith("(2 transactions failed so far)")
    assert back.endswith("; 2 transactions failed")
