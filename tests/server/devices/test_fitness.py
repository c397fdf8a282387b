"""A client with another model is refused in words that name the tensor, and what it sends along is not trusted."""

import asyncio
import hashlib
import json
from pathlib import Path

import httpx
import pytest
import torch

from tests.federations.server_device import Device, House, house, problem, run_file, small_state
from umbel.aggregation.messages import LAYOUT_CHARS_MAX
from umbel.aggregation.model.layout import Layout

RUN = run_file(target=2)
OTHER = {**small_state(), "newcomer": torch.zeros(3, 4)}


async def knock(device: Device, digest: str, text: str) -> httpx.Response:
    """A check-in that shows this text as its layout."""
    message = {"run": "demo", "sample_count": 10, "layout_digest": digest, "wait_s": 0.0, "layout": text}
    return await device.send("POST", "/v1/check-ins", json.dumps(message).encode())


async def refused(device: Device, layout: Layout, text: str) -> str:
    """What it is told."""
    answer = await knock(device, hashlib.sha256(text.encode()).hexdigest() if text else layout.digest, text)
    assert problem(answer) == "wrong-layout"
    return str(answer.json()["detail"])


async def away(it: House) -> list[str]:
    return [one["reason"] for one in (await it.progress())["turned_away"]]


@pytest.mark.usefixtures("any_database")
def test_the_operator_is_told_at_once_what_differs_when_the_client_has_shown_its_layout(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(RUN, small_state())
            [device] = await it.devices(1)
            layout = Layout.of_state(OTHER)
            assert "its layout digest is" in await refused(device, layout, "")
            assert "its layout digest is" in (await away(it))[0]
            told = await refused(device, layout, layout.to_json())
            assert "tensor 'newcomer' is not in the model" in told
            assert await away(it) == [told]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "text",
    ["[]" * 3, "[" * 20000, '[["a",[2],"float32",1,null]]', '[["a",[' + "9" * 9999 + '],"float32",0,null]]', "\0"],
)
def test_a_text_that_is_no_layout_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(RUN, small_state())
            [device] = await it.devices(1)
            assert "its layout digest is" in await refused(device, Layout.of_state(OTHER), text)

    asyncio.run(scenario())


def test_the_names_of_a_clients_tensors_fill_no_page_and_bring_no_escapes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(RUN, small_state())
            [device] = await it.devices(1)
            layout = Layout.of_state({"\x1b[2J\x00" + "long" * 2000: torch.zeros(1)} | small_state())
            told = await refused(device, layout, layout.to_json())
            assert len(told) < 500
            assert told.isprintable()

    asyncio.run(scenario())


def test_a_layout_that_is_too_long_or_not_of_its_digest_is_malformed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            await it.begin(RUN, small_state())
            [device] = await it.devices(1)
            long = "x" * (LAYOUT_CHARS_MAX + 1)
            for digest, text in ((hashlib.sha256(long.encode()).hexdigest(), long), ("0" * 64, "[]")):
                assert problem(await knock(device, digest, text)) == "malformed-request"

    asyncio.run(scenario())
