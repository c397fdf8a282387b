"""A coordinator that has just started answers requests while it imports torch."""

import asyncio
import threading
from pathlib import Path

import pytest

from tests.federations.server_device import house, run_file, small_state
from tests.servers.waits import LIMIT_S, until
from umbel.server.sums import torch_import


def test_requests_are_answered_while_a_first_model_waits_for_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_waits, may_end = 0, threading.Event()

    def slowly() -> None:
        nonlocal n_waits
        n_waits += 1
        assert may_end.wait(LIMIT_S)

    monkeypatch.setattr(torch_import, "import_torch", slowly)

    async def scenario() -> None:
        async with house(tmp_path) as it:
            beginning = asyncio.create_task(it.begin(run_file(), small_state()))
            await until("the upload of a model that waits for torch", lambda: n_waits == 1)
            assert (await it.http.get("/v1/health")).status_code == 200
            assert not beginning.done()
            may_end.set()
            await beginning

    asyncio.run(scenario())
    assert n_waits >= 2, "the new run waits for torch, too"
