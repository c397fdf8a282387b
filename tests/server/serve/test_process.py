"""`umbel serve` as a process: it says where it listens, keeps its directory to itself, and goes in good order."""

import asyncio
import fcntl
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.federations.server_device import House, problem, run_file, small_state
from tests.servers.waits import LIMIT_S, until_told, wait_for_file, wait_until
from tests.suite.nights import at_night
from umbel.server.http.limits import FILES_WANTED
from umbel.server.serve.process import CannotStart, run, usable_url
from umbel.server.settings import Settings
from umbel.server.store.keys import AdminKey

pytestmark = pytest.mark.slow
SERVE = "import typer\nfrom umbel.server.serve.commands import serve\ntyper.run(serve)"


async def n_waiting(it: House) -> int:
    return int((await it.progress())["live"]["waiting"])


async def nobody_waits(it: House) -> bool:
    return await n_waiting(it) == 0


def is_well(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/v1/health").status_code == 200
    return False


@contextmanager
def serving(data: Path, log: Path, files: int = 0, limit: str = "-n") -> Generator[tuple[subprocess.Popen[bytes], str]]:
    """A coordinator on a free port, and its URL. `files`: how many it may have open, by this `limit` of the shell's."""
    command = [sys.executable, "-c", SERVE, "--data", str(data), "--port", "0", "--log-level", "debug"]
    if files:
        command = ["sh", "-c", f'ulimit {limit} {files}; exec "$@"', "sh", *command]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process, wait_for_file(data / "endpoint", process, log).read_text().strip()
    finally:
        process.kill()
        process.wait()


def test_a_terminated_coordinator_answers_those_who_wait_and_exits_cleanly(tmp_path: Path) -> None:
    data, log = tmp_path / "data", tmp_path / "log"

    async def scenario(process: subprocess.Popen[bytes], url: str) -> str:
        async with httpx.AsyncClient(base_url=url, timeout=30.0) as http:
            it = House(http, Settings(data=data), None)
            layout = await it.begin(run_file(target=2, minimum=2), small_state())
            [device] = await it.devices(1)
            held = asyncio.create_task(device.check_in(layout, wait_s=25.0))
            await until_told("a client that waits", lambda: n_waiting(it))
            process.send_signal(signal.SIGTERM)
            assert problem(await held) == "shutting-down"
            return it.admin["Authorization"].removeprefix("Bearer ")

    with serving(data, log) as (process, url):
        command = [sys.executable, "-c", SERVE, "--data", str(data), "--port", "0"]
        second = subprocess.run(command, capture_output=True, text=True, check=False)
        assert second.returncode == 1
        assert "another coordinator uses" in second.stderr
        key = asyncio.run(scenario(process, url))
        assert process.wait(timeout=LIMIT_S) == 0
    printed = log.read_text()
    assert f"umbel coordinator at {url}, admin key in {data / 'admin.key'}" in printed
    assert key not in printed
    assert not (data / "endpoint").exists()


def test_a_directory_that_another_process_holds_by_its_lock_file_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions of umbel exclude one another by this file, so its name stays."""
    monkeypatch.setattr(os, "umask", lambda mask: mask)  # it would hold for all tests of this process
    (tmp_path / "admin.key").write_text("an unfit key: it stops a coordinator that ignores the lock")
    (tmp_path / "admin.key").chmod(0o644)
    with (tmp_path / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CannotStart, match="another coordinator uses"):
            run(Settings(data=tmp_path, port=0), "info")
    assert {path.name for path in tmp_path.iterdir()} == {"admin.key", "lock"}


def refused_start(data: Path) -> str:
    command = [sys.executable, "-c", SERVE, "--data", str(data), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def test_what_is_stored_is_for_its_owner_only(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o755)

    async def scenario(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=30.0) as http:
            await House(http, Settings(data=data), None).begin(run_file(), small_state())

    with serving(data, tmp_path / "log") as (_, url):
        asyncio.run(scenario(url))
        found = [data, *data.rglob("*")]
        assert len(list((data / "blobs" / "models").iterdir())) == 2
        assert [path for path in found if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_a_database_that_is_not_there_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBEL_DATABASE_URL", "postgresql+asyncpg://nobody:secret@127.0.0.1:1/none")
    told = refused_start(tmp_path / "data")
    assert "the database at 127.0.0.1:1/none does not answer: Connection refused; check database_url" in told
    assert "secret" not in told
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("h:x/x", "invalid literal"),
        *at_night(
            ("127.0.0.1:99999/x", "port must be 0-65535"),
            ("127.0.0.1/x?bogus=1", "unexpected keyword argument 'bogus'"),
        ),
        ("127.0.0.1:1/x?ssl=maybe", "`sslmode` parameter must be one of"),
    ],
)
def test_an_address_of_a_database_that_cannot_be_read_is_told_in_a_sentence(
    place: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMBEL_DATABASE_URL", f"postgresql+asyncpg://nobody:secret@{place}")
    told = refused_start(tmp_path / "data")
    assert "umbel serve: database_url is wrong: " in told
    assert why in told
    assert "secret" not in told
    assert not (tmp_path / "data").exists()


def test_a_port_that_is_taken_is_told_before_anything_is_made(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = [sys.executable, "-c", SERVE, "--data", str(tmp_path / "data"), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 1
    assert done.stderr == (
        f"umbel serve: port {port} of 127.0.0.1 is in use; stop the program that uses it, or choose another --port\n"
    )
    assert not (tmp_path / "data").exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("host", "why"), [("192.0.2.1", "has no address 192.0.2.1"), ("no.invalid", "find the address no")]
)
def test_an_address_that_is_not_ours_is_told_in_a_sentence(host: str, why: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVE, "--data", str(tmp_path / "data"), "--port", "0", "--host", host]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 1
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_a_driver_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asyncpg.py").write_text("raise ModuleNotFoundError(\"No module named 'asyncpg'\", name='asyncpg')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("UMBEL_DATABASE_URL", "postgresql+asyncpg://nobody@127.0.0.1:1/none")
    assert (
        "umbel serve: PostgreSQL needs the package asyncpg; install it in a clone of umbel: pip install"
        in refused_start(tmp_path / "data")
    )


def test_an_unknown_setting_is_told_with_the_one_that_was_meant(tmp_path: Path) -> None:
    config = tmp_path / "umbel.toml"
    config.write_text("prot = 1\n")
    command = [sys.executable, "-c", SERVE, "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 2
    assert "unknown setting 'prot' (did you mean 'port'?)" in done.stderr


def test_the_help_names_every_setting_and_the_defaults_of_those_with_flags() -> None:
    done = subprocess.run([sys.executable, "-c", SERVE, "--help"], capture_output=True, text=True, check=True)
    for name in Settings.model_fields:
        assert name in done.stdout
    for name in ("data", "host", "port"):
        assert f"[default: ({Settings.model_fields[name].default})]" in done.stdout


def test_a_new_admin_key_is_a_warning_and_an_old_one_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        AdminKey.load(tmp_path / "admin.key")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"created the admin key in {tmp_path / 'admin.key'}" in caplog.text


@pytest.mark.parametrize(("key", "mode", "why"), [("", 0o600, "0 characters"), ("k" * 43, 0o644, "chmod 600")])
def test_an_admin_key_that_lets_others_in_is_refused(key: str, mode: int, why: str, tmp_path: Path) -> None:
    (tmp_path / "admin.key").write_text(key)
    (tmp_path / "admin.key").chmod(mode)
    assert why in refused_start(tmp_path)


def test_a_process_that_may_open_few_files_says_so_and_takes_all_that_it_may(tmp_path: Path) -> None:
    with serving(tmp_path / "data", tmp_path / "log", files=1024) as (process, _):
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (1024, 1024)
    said = "at most 320 connections at a time, not 10000: this process may open only 1024 files"
    assert said in (tmp_path / "log").read_text()


def test_a_low_soft_limit_is_raised_to_what_is_needed(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED)
    with serving(tmp_path / "data", tmp_path / "log", files=256, limit="-Sn") as (process, _):
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (raised, hard)


@pytest.mark.nightly
def test_too_many_connections_never_use_up_the_files_of_the_process(tmp_path: Path) -> None:
    data, log = tmp_path / "data", tmp_path / "log"
    with serving(data, log, files=256) as (_, url):
        held = [socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)) for _ in range(400)]
        closed = 0
        for connection in held:
            connection.sendall(b"GET /v1/health HTTP/1.1\r\n")
            connection.settimeout(0.2 if closed == 0 else 0.01)
            with suppress(TimeoutError, ConnectionError):
                closed += connection.recv(1) == b""
            connection.close()
        wait_until("an answer", lambda: is_well(url))
    assert "Too many open files" not in log.read_text()
    assert log.read_text().count("connections are taken") == 1


def test_a_coordinator_listens_before_it_imports_torch() -> None:
    told = "import sys, umbel.server.serve.process as one; sys.exit('torch' in sys.modules or not one.run)"
    assert subprocess.run([sys.executable, "-c", told], check=False).returncode == 0


def test_an_unknown_log_level_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVE, "--log-level", "loud"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--log-level" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_peer_that_hangs_up_no_longer_waits(tmp_path: Path) -> None:
    async def scenario(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=30.0) as http:
            it = House(http, Settings(data=tmp_path / "data"), None)
            layout = await it.begin(run_file(target=2, minimum=2), small_state())
            [device] = await it.devices(1)
            held = asyncio.create_task(device.check_in(layout, wait_s=25.0))
            await until_told("a client that waits", lambda: n_waiting(it))
            held.cancel()
            await until_told("nobody waiting", lambda: nobody_waits(it))

    with serving(tmp_path / "data", tmp_path / "log") as (_, url):
        asyncio.run(scenario(url))


def test_the_address_that_is_told_can_be_used() -> None:
    assert usable_url("0.0.0.0", 8750) == "http://127.0.0.1:8750"
    assert usable_url("::", 8750) == "http://[::1]:8750"
    assert usable_url("192.0.2.7", 80) == "http://192.0.2.7:80"
