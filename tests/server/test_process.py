"""`umbel serve` as a process: it says where it listens, keeps its directory to itself, and goes in good order."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.server_device import House, problem, run_file, small_state
from umbel.server.settings import Settings

SERVE = "import typer\nfrom umbel.server.commands import serve\ntyper.run(serve)"


@contextmanager
def serving(data: Path, log: Path) -> Generator[tuple[subprocess.Popen[bytes], str]]:
    """A coordinator on a free port, and its URL."""
    command = [sys.executable, "-c", SERVE, "--data", str(data), "--port", "0", "--log-level", "debug"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60.0
        while not (data / "endpoint").exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process, (data / "endpoint").read_text().strip()
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
            while not (await it.progress(wait_s=1.0))["live"]["waiting"]:
                pass
            process.send_signal(signal.SIGTERM)
            assert problem(await held) == "shutting-down"
            return it.admin["Authorization"].removeprefix("Bearer ")

    with serving(data, log) as (process, url):
        command = [sys.executable, "-c", SERVE, "--data", str(data), "--port", "0"]
        second = subprocess.run(command, capture_output=True, text=True, check=False)
        assert second.returncode == 1
        assert "another coordinator works on" in second.stderr
        key = asyncio.run(scenario(process, url))
        assert process.wait(timeout=10.0) == 0
    printed = log.read_text()
    assert f"umbel coordinator at {url}, admin key in {data / 'admin.key'}" in printed
    assert key not in printed
    assert not (data / "endpoint").exists()


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
            while not (await it.progress(wait_s=1.0))["live"]["waiting"]:
                pass
            held.cancel()
            deadline = time.monotonic() + 10.0
            while (await it.progress(wait_s=0.1))["live"]["waiting"]:
                assert time.monotonic() < deadline

    with serving(tmp_path / "data", tmp_path / "log") as (_, url):
        asyncio.run(scenario(url))
