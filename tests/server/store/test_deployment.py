"""What all coordinators over a database must share: written down by the first, compared by each, before it listens."""

import asyncio
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.server.serve.test_process import SERVE
from tests.servers.killing import start
from tests.servers.ports import own_port
from tests.servers.postgres import Cluster
from tests.servers.s3_server import bucket_settings, s3_server
from tests.servers.waits import LIMIT_S, wait_for_file
from umbel.server.blobs.choose import open_blobs
from umbel.server.settings import Settings
from umbel.server.store.database import Database
from umbel.server.store.deployment import Deployment, DeploymentPlaces, UnfitDeployment
from umbel.server.store.keys import AdminKey, AuditKey

Make = Callable[..., Settings]


@pytest.fixture(params=["sqlite", "postgresql"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes the settings of one more coordinator over the test's database, which shares all unless told otherwise."""
    if request.param == "sqlite":
        url = f"sqlite+aiosqlite:///{tmp_path / 'umbel.db'}"
    else:
        cluster: Cluster = request.getfixturevalue("postgresql")
        url = cluster.new_database()

    def make(**own: object) -> Settings:
        shared = {
            "data": tmp_path / "data",
            "database_url": url,
            "blobs": str(tmp_path / "blobs"),
            "audit_key_file": tmp_path / "audit.key",
            "admin_key_file": tmp_path / "admin.key",
        }
        return Settings.model_validate({**shared, **own})

    return make


async def settle(*settings: Settings, adopt: bool = False) -> list[str]:
    """Coordinators that start at the same moment: why each is refused, or nothing."""
    async with AsyncExitStack() as stack:
        deployments: list[Deployment] = []
        for one in settings:
            one.data.mkdir(exist_ok=True)
            database, blobs = Database(one.database), open_blobs(one)
            stack.push_async_callback(database.close)
            await asyncio.to_thread(blobs.prepare)
            await database.migrate()
            named = DeploymentPlaces(one.blobs or "", str(one.audit_key_path), str(one.admin_key_path))
            audit_key, admin_key = AuditKey.load(one.audit_key_path), AdminKey.load(one.admin_key_path)
            deployments.append(Deployment(database, blobs, audit_key.public, admin_key, named))
        ends = await asyncio.gather(*(one.settle(adopt=adopt) for one in deployments), return_exceptions=True)
    assert all(end is None or isinstance(end, UnfitDeployment) for end in ends), ends
    return [str(end or "") for end in ends]


def settled(*settings: Settings, adopt: bool = False) -> list[str]:
    return asyncio.run(settle(*settings, adopt=adopt))


def test_those_that_share_everything_agree_however_they_start(made: Make, tmp_path: Path) -> None:
    assert settled(*(made() for _ in range(5))) == [""] * 5
    assert settled(made()) == [""]
    assert len(list((tmp_path / "blobs" / "deployment" / "marks").iterdir())) == 1
    assert len(list((tmp_path / "blobs" / "deployment" / "claims").iterdir())) == 1


def test_of_two_stores_one_is_refused_even_at_the_first_start(made: Make, tmp_path: Path) -> None:
    settings = [made(blobs=str(tmp_path / name)) for name in "ab"]
    ends = settled(*settings)
    refused = next(index for index, end in enumerate(ends) if end)
    assert f"the blobs in {settings[refused].blobs} do not belong to this database" in ends[refused]
    assert ends[1 - refused] == ""
    assert settled(settings[1 - refused]) == [""]


def test_a_store_that_was_emptied_is_refused_and_taken_again_once_restored(made: Make, tmp_path: Path) -> None:
    assert settled(made()) == [""]
    (tmp_path / "blobs").rename(tmp_path / "backup")
    [refused] = settled(made())
    assert "which has 0 runs" in refused
    assert "If the store was emptied, restore the backup" in refused
    shutil.rmtree(tmp_path / "blobs")
    (tmp_path / "backup").rename(tmp_path / "blobs")
    assert settled(made()) == [""]


def test_another_databases_store_is_refused(made: Make, tmp_path: Path) -> None:
    assert settled(made()) == [""]
    other = made(database_url=f"sqlite+aiosqlite:///{tmp_path / 'other.db'}")
    [refused] = settled(other)
    assert f"the blobs in {tmp_path / 'blobs'} belong to another database" in refused
    assert settled(made()) == [""]
    assert settled(other, adopt=True) == [""]
    assert "belong to another database" in settled(made())[0]


def test_two_databases_that_find_an_empty_store_at_once_do_not_both_have_it(made: Make, tmp_path: Path) -> None:
    other = made(database_url=f"sqlite+aiosqlite:///{tmp_path / 'other.db'}")
    assert settled(made(), other).count("") <= 1


def test_another_audit_key_is_refused_until_it_is_adopted(made: Make, tmp_path: Path) -> None:
    assert settled(made()) == [""]
    known = AuditKey.load(tmp_path / "audit.key").public
    other = made(audit_key_file=tmp_path / "other.key")
    [refused] = settled(other)
    assert f"sign with {known}" in refused
    assert f"the audit key in {tmp_path / 'other.key'} is {AuditKey.load(tmp_path / 'other.key').public}" in refused
    assert settled(other, adopt=True) == [""]
    assert settled(other) == [""]
    assert "the audit key in" in settled(made())[0]


def test_another_store_is_adopted_and_the_old_one_is_then_refused(made: Make, tmp_path: Path) -> None:
    assert settled(made()) == [""]
    assert settled(made(blobs=str(tmp_path / "new")), adopt=True) == [""]
    assert settled(made(blobs=str(tmp_path / "new"))) == [""]
    assert "do not belong to this database" in settled(made())[0]


def test_another_admin_key_makes_a_warning_once(made: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name == "umbel.server.store.deployment"]

    other = made(admin_key_file=tmp_path / "new.key")
    with caplog.at_level(logging.WARNING, "umbel.server.store.deployment"):
        assert settled(made()) == settled(made()) == [""]
        assert not told()
        assert settled(other) == settled(other) == [""]
    [record] = told()
    assert f"the admin key in {tmp_path / 'new.key'} is not the one that" in record.getMessage()
    assert (tmp_path / "new.key").read_text().strip() not in caplog.text


def test_a_bucket_is_marked_and_compared_as_a_directory_is(tmp_path: Path) -> None:
    with s3_server() as server:
        one, other = (bucket_settings(server, tmp_path) for _ in range(2))
        assert settled(one, one) == ["", ""]
        assert "do not belong to this database" in settled(other)[0]


@pytest.mark.slow
def test_a_coordinator_that_does_not_fit_says_so_before_it_listens(made: Make, tmp_path: Path) -> None:
    first = start(made(port=own_port(), data=tmp_path / "first"))
    try:
        wait_for_file(tmp_path / "first" / "endpoint", first, tmp_path / "first" / "log")
        port = own_port()
        command = [sys.executable, "-c", SERVE, "--data", str(tmp_path / "second"), "--port", str(port)]
        settings = made()
        environment = {
            **os.environ,
            "UMBEL_DATABASE_URL": settings.database,
            "UMBEL_BLOBS": str(tmp_path / "elsewhere"),
            "UMBEL_AUDIT_KEY_FILE": str(settings.audit_key_file),
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith("umbel serve: the blobs in")
        assert "Traceback" not in done.stderr
        assert "umbel coordinator at" not in done.stderr
        with socket.create_server(("127.0.0.1", port)):
            pass
    finally:
        first.kill()
        first.join()
