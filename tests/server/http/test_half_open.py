"""A thousand uploads that are begun and never go on, and heads that drip: honest devices go on being answered."""

import asyncio
import resource
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.federations.server_device import Device, House, run_file, small_state
from tests.server.serve.test_process import serving
from umbel.server.settings import Settings

N_HALF_OPEN = 1000
KB_EACH_MAX = 100


async def half_open(port: int, head: bytes) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    await writer.drain()
    return writer


def upload_head(device: Device, number: int) -> bytes:
    """A signed upload of 60,000 bytes, of which none will come."""
    path = f"/v1/assignments/demo.1.1.{number}/update"
    fields = device.headers("POST", path, bytes(60_000)) | {"Content-Length": "60000", "Host": "x"}
    return (f"POST {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fields.items()) + "\r\n").encode()


@pytest.mark.realtime
def test_a_thousand_half_open_uploads_and_dripping_heads_do_not_stop_honest_devices(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))

    async def scenario(url: str, pid: int) -> list[float]:
        port = httpx.URL(url).port or 0
        async with httpx.AsyncClient(base_url=url, timeout=30.0) as http:
            it = House(http, Settings(data=tmp_path / "data"), None)
            layout = await it.begin(run_file(target=50, minimum=50), small_state())
            *honest, wicked = await it.devices(11)
            before = psutil.Process(pid).memory_info().rss
            uploads = [await half_open(port, upload_head(wicked, i)) for i in range(N_HALF_OPEN)]
            drips = [await half_open(port, b"GET /v1/health HTTP/1.1\r\nHost: x\r\n") for _ in range(N_HALF_OPEN)]
            took: list[float] = []
            for _ in range(20):
                for writer in drips:
                    if not writer.is_closing():
                        writer.write(b"A: b\r\n")
                for device in honest:
                    started = time.monotonic()
                    answer = await device.check_in(layout, wait_s=0.0)
                    took.append(time.monotonic() - started)
                    assert answer.status_code == 200
            grown = psutil.Process(pid).memory_info().rss - before
            assert grown / (2 * N_HALF_OPEN) < KB_EACH_MAX * 1024
            for writer in (*uploads, *drips):
                writer.transport.abort()
            return took

    with serving(tmp_path / "data", tmp_path / "log") as (process, url):
        took = asyncio.run(scenario(url, process.pid))
    assert sorted(took)[len(took) * 95 // 100] < 2.0
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
