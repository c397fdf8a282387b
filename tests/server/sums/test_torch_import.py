"""A coordinator that has just started answers requests while it imports torch."""

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.federations.server_device import House, house, run_file, small_state, update_of
from tests.servers.waits import LIMIT_S, until
from umbel.server.sums import torch_import


class SlowImport:
    """An import of torch that lasts until a test lets it end."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.n_waits, self._may_end = 0, threading.Event()
        self._imported = threading.Event()
        patch.setattr(torch_import, "import_torch", self._import)
        patch.setattr(torch_import, "_imported", self._imported)

    def _import(self) -> None:
        self.n_waits += 1
        assert self._may_end.wait(LIMIT_S)
        self._imported.set()

    async def ends_after(self, it: House, asked: Coroutine[Any, Any, Any], n_waits: int) -> Any:
        """The answer to what was asked, which waits for the import, as the `n_waits`-th that does."""
        waiting = asyncio.create_task(asked)
        await until(f"{n_waits} that wait for torch", lambda: self.n_waits >= n_waits)
        assert (await it.http.get("/v1/health")).status_code == 200
        assert not waiting.done()
        self._may_end.set()
        return await waiting


def test_requests_are_answered_while_a_first_model_waits_for_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            slow = SlowImport(monkeypatch)
            await slow.ends_after(it, it.begin(run_file(), small_state()), 1)

    asyncio.run(scenario())


def test_requests_are_answered_while_a_run_of_before_waits_for_torch_to_open_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=1), small_state())
            [device] = await it.devices(1)
        slow = SlowImport(monkeypatch)
        async with house(tmp_path) as it:
            device.http = it.http
            assignment = await slow.ends_after(it, device.work(layout), 1)
            assert assignment["round"] == 1

    asyncio.run(scenario())


def test_requests_are_answered_while_an_upload_waits_for_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another replica has opened the round, and this one has just started."""

    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=1), small_state())
            [device] = await it.devices(1)
            assignment, update = await device.work(layout), update_of(layout, torch.zeros(layout.n_values))
            slow = SlowImport(monkeypatch)
            answer = await slow.ends_after(it, device.upload(assignment["id"], update), 1)
            assert answer.status_code == 201

    asyncio.run(scenario())
