"""Folding trusts no file: what no longer stands on the grid fails the fold instead of entering the sum. A sum that is
written while updates come has in it exactly whom it names."""

import asyncio
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.federations.server_device import small_state, update_of
from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.errors import UpdateOutOfRange
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import CodecPlan, Grid, Part
from umbel.aggregation.types import ClientId
from umbel.server.blobs.local import LocalBlobs
from umbel.server.store.stored import Chunk
from umbel.server.sums.share import Folding

LAYOUT = Layout.of_state(small_state())
CODEC = codec_for(CodecPlan(), Grid.finest(max_abs=8.0, total_weight_max=10), LAYOUT)


def test_a_sum_that_is_written_while_updates_come_has_in_it_whom_it_names(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path)
    blobs.prepare()
    update = update_of(LAYOUT, torch.ones(LAYOUT.n_values))
    with blobs.scratch() as path:
        path.write_bytes(update)
        blobs.put(path, "updates/any/0")
    chunks = [Chunk("updates/any/0", len(update))]

    async def scenario() -> None:
        with ThreadPoolExecutor(1) as worker:
            folding, is_let_go = Folding(CODEC, blobs, worker), threading.Event()
            worker.submit(is_let_go.wait)
            folding.add(ClientId("a"), chunks, Part(1, 0))
            folding.add(ClientId("b"), chunks, Part(2, 0))
            writing = asyncio.create_task(folding.write(tmp_path / "sum"))
            await asyncio.sleep(0)
            folding.add(ClientId("c"), chunks, Part(4, 0))
            is_let_go.set()
            written, total = await writing, await folding.total()
            assert written.clients == {ClientId("a"), ClientId("b")}
            assert written.total_weight == 3
            data = (tmp_path / "sum").read_bytes()
            assert hashlib.sha256(data).hexdigest() == written.sha256
            stored = torch.frombuffer(bytearray(data), dtype=torch.int64)
            assert total.total_weight == 7
            assert (7 * stored).equal(3 * total.sums)

    asyncio.run(scenario())


def test_a_sum_with_a_fold_that_failed_is_not_written(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path)
    blobs.prepare()

    async def scenario() -> None:
        with ThreadPoolExecutor(1) as worker:
            folding = Folding(CODEC, blobs, worker)
            folding.add(ClientId("a"), [Chunk("updates/a/0", 8)], Part(1, 0))
            with pytest.raises(FileNotFoundError):
                await folding.write(tmp_path / "sum")

    asyncio.run(scenario())


def test_an_update_that_left_the_grid_after_its_check_fails_the_fold(tmp_path: Path) -> None:
    values = torch.zeros(LAYOUT.n_values)
    values[-1] = 15000.0
    update = update_of(LAYOUT, values)
    blobs = LocalBlobs(tmp_path)
    blobs.prepare()
    with blobs.scratch() as path:
        path.write_bytes(update)
        blobs.put(path, "updates/a/0")

    async def fold() -> None:
        with ThreadPoolExecutor(1) as worker:
            folding = Folding(CODEC, blobs, worker)
            folding.add(ClientId("a"), [Chunk("updates/a/0", len(update))], Part(1, 0))
            await folding.total()

    with pytest.raises(UpdateOutOfRange):
        asyncio.run(fold())
