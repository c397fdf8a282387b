"""A check-in changes nothing unless it is admitted, and what it changes is stored with its nonce."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.server_device import Device, Json, house, problem, run_file, small_state
from umbel.aggregation.layout import Layout
from umbel.server.waiting import HELD_MAX

pytestmark = pytest.mark.usefixtures("any_database")
_URL = "/v1/check-ins"


def body_of(device: Device, layout: Layout, wait_s: float) -> bytes:
    message = {"run": device.run, "sample_count": 10, "layout_digest": layout.digest, "wait_s": wait_s}
    return json.dumps(message).encode()


def test_a_stranger_who_repeats_a_clients_check_in_does_not_end_those_it_holds_open(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=2), small_state())
            [device] = await it.devices(1)
            body = body_of(device, layout, 20.0)
            signed: list[Json] = [device.headers("POST", _URL, body) for _ in range(HELD_MAX)]
            held = [asyncio.create_task(it.http.post(_URL, content=body, headers=one)) for one in signed]
            await asyncio.sleep(0.5)  # until they are held
            for one in signed:
                assert problem(await it.http.post(_URL, content=body, headers=one)) == "replayed-nonce"
            assert not any(request.done() for request in held)
            assert (await it.progress())["live"]["waiting"] == 1
            for request in held:
                request.cancel()

    asyncio.run(scenario())


def test_a_check_in_with_a_body_other_than_the_signed_one_may_be_sent_again(tmp_path: Path) -> None:
    """Nothing was remembered of it, so that a body that was damaged on its way costs no new signature."""

    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=2), small_state())
            [device] = await it.devices(1)
            body = body_of(device, layout, 0.0)
            signed = device.headers("POST", _URL, body)
            damaged = await it.http.post(_URL, content=body.replace(b"demo", b"dem0"), headers=signed)
            assert problem(damaged) == "wrong-digest"
            assert (await it.http.post(_URL, content=body, headers=signed)).status_code == 200
            assert problem(await it.http.post(_URL, content=body, headers=signed)) == "replayed-nonce"

    asyncio.run(scenario())
