"""Rounds of every codec that a run file can name: the model moves by the mean, and an auditor makes it again."""

import asyncio
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from tests.federations.audit_house import operating
from tests.federations.server_device import House, Json, house, problem, run_file, small_state, update_for
from umbel.aggregation.codec.update_codec import codec_for
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import CodecPlan, Grid
from umbel.client.cli.audit import replay_run

STATE = {"w": torch.zeros(40, 50), "b": torch.zeros(1000)}
PLANS = TypeAdapter(CodecPlan)
LAYOUT = Layout.of_state(STATE)
RUN = run_file(count=2, target=2, minimum=2, window_s=60.0) + '[retention]\nupdates = "all"\n[codec]\n'
CODECS = {
    "auto": 'name = "auto"\nfirst_norm = 0.5',
    "eden": 'name = "eden"\nbits = 3',
    "sign": 'name = "sign"\nerror_feedback = true',
    "ternary": 'name = "ternary"',
    "qsgd": 'name = "qsgd"\nlevels = 1000',
    "topk": 'name = "topk"\nshare = 0.05\nerror_feedback = true\nmomentum = 0.9\nwarm_up_rounds = 1',
    "mask": 'name = "mask"\nevery = 4\nmode = "structured"',
    "lowrank": 'name = "lowrank"\nrank = 3',
    "planes": 'name = "planes"\nprecision = "bfloat16"',
}


def values_of(i: int, number: int) -> torch.Tensor:
    return 0.01 * torch.randn(LAYOUT.n_values, generator=torch.Generator().manual_seed(10 * number + i))


def as_sent(assignment: Json, update: bytes) -> torch.Tensor:
    plan, grid = PLANS.validate_python(assignment["codec"]), Grid(**assignment["grid"])
    codec = codec_for(plan, grid, LAYOUT)
    body = [update[codec.header_bytes :]]
    return torch.cat(list(codec.integers(update[: codec.header_bytes], body, assignment["rank"]))).double() * grid.step


async def play(it: House) -> list[Json]:
    """Two rounds; what was asked in each."""
    devices, asked = await it.devices(2), list[Json]()
    for number in (1, 2):
        assignments = await asyncio.gather(*(device.work(LAYOUT) for device in devices))
        before, moved = await it.model(assignments[0]["model"]["sha256"]), list[torch.Tensor]()
        for i, (device, assignment) in enumerate(zip(devices, assignments, strict=True)):
            update = update_for(assignment, LAYOUT, values_of(i, number))
            assert (await device.upload(assignment["id"], update)).status_code == 201
            told = await device.report(assignment["id"], update, upload_bytes_per_s=1e9)
            assert told.json()["outcome"] == "accepted", told.text
            if assignment["codec"]["codec"] != 1:
                moved.append(as_sent(assignment, update))
        record = (await it.ended(number))[-1]
        after = await it.model(record["model_sha256"])
        if moved:
            found = torch.cat([(after[s.name] - before[s.name]).reshape(-1).double() for s in LAYOUT.owners()])
            torch.testing.assert_close(found, sum(moved) / 2, rtol=0, atol=2e-8)
        assert record["bytes_up"] < 2 * 4 * LAYOUT.n_values
        asked.append(assignments[0])
    return asked


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
def test_a_run_of_each_codec_moves_by_the_mean_and_can_be_made_again(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(RUN + CODECS[name], STATE)
            first, second = await play(it)
            assert first["codec"]["key"] != second["codec"]["key"]
            if name == "topk":
                assert [one["codec"]["parameters"]["share"] for one in (first, second)] == [0.25, 0.0625]
            if name == "auto":
                steps = [1 / one["codec"]["inverse_step"] for one in (first, second)]
                assert steps[1] < 0.01 / 64, "these lines are fast"
            await operating(it, lambda operator: replay_run(operator, "demo", all_=True))

    asyncio.run(scenario())
    assert "the same hash" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(CODECS.keys() - {"auto"}))
def test_an_update_of_another_codec_or_length_is_refused(name: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(RUN + CODECS[name], STATE)
            devices = await it.devices(2)
            assignment, _ = await asyncio.gather(*(device.work(LAYOUT) for device in devices))
            good = update_for(assignment, LAYOUT, values_of(0, 1))
            other = good[:5] + b"\0" + good[6:]
            assert problem(await devices[0].upload(assignment["id"], other)) == "wrong-codec"
            kinds = {"lying-length", "malformed-update"}
            assert problem(await devices[0].upload(assignment["id"], good[:-1])) in kinds
            assert problem(await devices[0].upload(assignment["id"], good + bytes(100_000))) in kinds
            assert (await devices[0].upload(assignment["id"], good)).status_code == 201

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("codec", "sentence"),
    [
        ('name = "eden"\nerror_feedback = true', "error_feedback does not work with these settings of eden"),
        ('name = "eden"\nstep = 0.5', 'name = \\"eden\\" does not take the key step; it takes bits'),
        ('name = "gzip"', "Input should be 'float32', 'integer', 'auto'"),
    ],
)
def test_a_run_file_that_cannot_work_is_refused_with_a_sentence(codec: str, sentence: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            refused = await it.put_run(RUN + codec, await it.put_model(STATE))
            assert refused.status_code == 422
            assert sentence in refused.text

    asyncio.run(scenario())


def test_counters_go_through_every_codec_exactly(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=2) + '[codec]\nname = "sign"\n', small_state())
            devices = await it.devices(2)
            await asyncio.gather(*(device.take_part(layout, torch.ones(layout.n_values)) for device in devices))
            [record] = await it.ended(1)
            model = await it.model(record["model_sha256"])
            assert int(model["norm.num_batches_tracked"]) == 3 + (1 << 16), "a change of 1 in the vector is 2^16"

    asyncio.run(scenario())
