"""A whole run over HTTP: from enrolment to the committed model, compared with the mean worked out by hand."""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.federations.server_device import house, run_file, small_state
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.optimizer import next_master
from umbel.aggregation.model.state import master_of, published_state
from umbel.aggregation.plans.grid import Grid
from umbel.aggregation.update.grid import GridAccumulator

pytestmark = pytest.mark.usefixtures("any_database_in_time")


def values_of(layout: Layout, seed: int) -> torch.Tensor:
    return torch.randn(layout.n_values, generator=torch.Generator().manual_seed(seed))


def test_a_round_gives_exactly_the_weighted_mean(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            start = small_state()
            layout = await it.begin(run_file(), start)
            devices = await it.devices(3)
            answers = await asyncio.gather(
                *(device.take_part(layout, values_of(layout, i)) for i, device in enumerate(devices))
            )
            assert {answer["outcome"] for answer in answers} == {"accepted"}
            [record] = await it.ended(1)
            total = GridAccumulator(layout.n_values, Grid.finest(max_abs=8.0, total_weight_max=3000))
            for i in range(3):
                total.fold_vector(values_of(layout, i), 10)
            master = next_master(layout, master_of(layout, start), total)
            expected = layout.full_state(published_state(layout, master))
            model = await it.model(record["model_sha256"])
            assert model.keys() == expected.keys()
            for name, tensor in expected.items():
                assert model[name].dtype == tensor.dtype
                assert torch.equal(model[name], tensor), name
            assert (record["reported"], record["selected"], record["committed"]) == (3, 3, True)

    asyncio.run(scenario())
