"""An operator's own client, spoken to a coordinator in memory; a run's audit bundles as they come."""

import asyncio
from collections.abc import Callable

import httpx

from tests.federations.server_device import House, Json
from umbel.client.operator.operator import Operator


class _Bridge(httpx.BaseTransport):
    """Requests of a synchronous client, answered by an application that runs in the event loop of another thread."""

    def __init__(self, it: House, loop: asyncio.AbstractEventLoop) -> None:
        self._it, self._loop = it, loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return asyncio.run_coroutine_threadsafe(self._ask(request), self._loop).result()

    async def _ask(self, request: httpx.Request) -> httpx.Response:
        answer = await self._it.http.request(
            request.method, request.url, headers=request.headers, content=request.read()
        )
        return httpx.Response(answer.status_code, headers=answer.headers, content=iter([answer.content]))


async def operating(it: House, act: Callable[[Operator], object]) -> None:
    """Do what an operator does, from a thread."""
    key = it.settings.admin_key_path.read_text().strip()
    bridge = _Bridge(it, asyncio.get_running_loop())

    def work() -> None:
        with Operator("http://127.0.0.1", key, bridge) as operator:
            act(operator)

    await asyncio.to_thread(work)


async def bundles(it: House) -> list[Json]:
    answer = await it.http.get("/v1/admin/runs/demo/audit", headers=it.admin)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["bundles"])
