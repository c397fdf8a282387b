"""Folding trusts no file: what no longer stands on the grid fails the fold instead of entering the sum."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.server_device import small_state, update_of
from umbel.aggregation.codec.plan import CodecPlan
from umbel.aggregation.errors import UpdateOutOfRange
from umbel.aggregation.grid import Grid
from umbel.aggregation.layout import Layout
from umbel.aggregation.types import ClientId
from umbel.aggregation.update_codec import Part, codec_for
from umbel.server.folding import Folding
from umbel.server.local_blobs import LocalBlobs
from umbel.server.stored import Chunk


def test_an_update_that_left_the_grid_after_its_check_fails_the_fold(tmp_path: Path) -> None:
    layout = Layout.of_state(small_state())
    values = torch.zeros(layout.n_values)
    values[-1] = 15000.0
    update = update_of(layout, values)
    blobs = LocalBlobs(tmp_path)
    blobs.prepare()
    with blobs.scratch() as path:
        path.write_bytes(update)
        blobs.put(path, "updates/a/0")

    async def fold() -> None:
        with ThreadPoolExecutor(1) as worker:
            codec = codec_for(CodecPlan(), Grid.finest(max_abs=8.0, total_weight_max=10), layout)
            folding = Folding(codec, blobs, worker)
            folding.add(ClientId("a"), [Chunk("updates/a/0", len(update))], Part(1, 0))
            await folding.total()

    with pytest.raises(UpdateOutOfRange):
        asyncio.run(fold())
