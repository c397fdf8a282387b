"""Who gets which model: a client those of runs that ask it, or have asked it. To know a model's hash is not enough."""

import asyncio
from pathlib import Path

import httpx
import pytest
import torch

from tests.federations.server_device import Device, House, house, problem, run_file, small_state
from tests.server.devices.test_fitness import knock
from tests.server.devices.test_member_lists import bound_run, list_of, put_run, text_of
from tests.server.replicas.test_replicas_together import at, pair
from tests.server.secure.test_secure_rounds import LAYOUT, STATE
from tests.servers.postgres import Cluster
from tests.servers.s3_server import bucket_fields, s3_server
from umbel.aggregation.model.layout import Layout
from umbel.server.runs import coordinator

NOBODYS = "0" * 64
CHANGE = '[downlink]\nname = "change"\n'
ONES = torch.ones(Layout.of_state(small_state()).n_values)


async def asked_for(device: Device, sha256: str, method: str = "GET", query: str = "") -> httpx.Response:
    return await device.send(method, f"/v1/models/{sha256}{query}")


async def refused(device: Device, sha256: str) -> None:
    """As a model that there is not is refused, to the last letter."""
    answer, nobodys = await asked_for(device, sha256), await asked_for(device, NOBODYS)
    assert problem(answer) == problem(nobodys) == "unknown-model"
    assert answer.text == nobodys.text
    assert (await asked_for(device, sha256, "HEAD")).status_code == 404


async def fetched(device: Device, sha256: str) -> None:
    answer = await asked_for(device, sha256)
    assert answer.status_code == 200, answer.text


async def committed(it: House, device: Device, layout: Layout, count: int) -> None:
    """This device alone makes the rounds up to number `count`."""
    assert (await device.take_part(layout, ONES))["outcome"] == "accepted"
    assert (await it.ended(count))[-1]["committed"]


@pytest.mark.usefixtures("any_database")
def test_a_client_gets_no_file_of_a_run_that_has_never_asked_it(tmp_path: Path) -> None:
    """Neither one that takes part in another run, nor one that waits for work in this one."""

    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(count=3, target=1) + CHANGE, small_state())
            other_file = run_file(target=1).replace('"demo"', '"other"')
            assert (await it.put_run(other_file, await it.put_model(small_state(1)), "other")).status_code == 201
            [mine, theirs, waiting] = await it.devices(3)
            theirs.run = "other"
            first = (await mine.work(layout))["model"]["sha256"]
            await committed(it, mine, layout, 1)
            assignment = await mine.work(layout)
            newest, [change] = assignment["model"]["sha256"], assignment["changes"]
            others = (await theirs.work(layout))["model"]["sha256"]
            assert (await waiting.check_in(layout, wait_s=0.0)).json()["assignment"] is None
            for sha256 in (first, newest, change["sha256"]):
                await fetched(mine, sha256)
                await refused(theirs, sha256)
                await refused(waiting, sha256)
            await fetched(theirs, others)
            await refused(mine, others)
            await refused(mine, await it.put_model(small_state(2)))  # of no run

    asyncio.run(scenario())


@pytest.mark.usefixtures("any_database")
def test_what_a_run_has_asked_a_client_to_fetch_it_gets_after_the_round_and_after_the_run(tmp_path: Path) -> None:
    """A download that was cut may go on when others have made the next model."""

    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(count=2, target=1), small_state())
            [slow, fast] = await it.devices(2)
            first = (await slow.work(layout))["model"]["sha256"]
            half = await slow.send("GET", f"/v1/models/{first}", headers={"Range": "bytes=0-99"})
            assert half.status_code == 206
            await committed(it, slow, layout, 1)
            await committed(it, fast, layout, 2)
            rest = await slow.send("GET", f"/v1/models/{first}", headers={"Range": "bytes=100-"})
            assert rest.status_code == 206
            assert it.state.coordinator.drivers["demo"].is_over
            await fetched(slow, first)
            await fetched(fast, first)

    asyncio.run(scenario())


@pytest.mark.usefixtures("any_database")
def test_a_file_of_two_runs_is_got_from_either(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            layout = await it.begin(run_file(target=1), small_state())
            other_file = run_file(target=1).replace('"demo"', '"other"')
            assert (await it.put_run(other_file, await it.put_model(small_state()), "other")).status_code == 201
            [mine, theirs, nobody] = await it.devices(3)
            theirs.run = "other"
            sha256 = (await mine.work(layout))["model"]["sha256"]
            assert (await theirs.work(layout))["model"]["sha256"] == sha256
            await fetched(mine, sha256)
            await fetched(theirs, sha256)
            await refused(nobody, sha256)

    asyncio.run(scenario())


@pytest.mark.usefixtures("any_database")
def test_who_is_not_on_the_member_list_gets_no_model_not_even_what_it_was_asked_for_before(tmp_path: Path) -> None:
    """The list may come after the stranger was drawn."""

    async def scenario() -> None:
        async with house(tmp_path) as it:
            *members, stranger = await it.devices(4, sample_count=0)
            listed = list_of(*members)
            file = bound_run(listed, target=4)
            await it.begin(file, STATE)
            drawn = await asyncio.gather(*(one.work(LAYOUT) for one in (*members, stranger)))
            sha256 = drawn[0]["model"]["sha256"]
            await fetched(stranger, sha256)
            assert (await put_run(it, file, text_of(listed))).status_code == 200
            await refused(stranger, sha256)
            for member in members:
                await fetched(member, sha256)

    asyncio.run(scenario())


def test_a_stranger_is_not_told_how_a_runs_layout_differs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            *members, stranger = await it.devices(4, sample_count=0)
            listed = list_of(*members)
            assert (await put_run(it, bound_run(listed), text_of(listed))).status_code == 201
            another = Layout.of_state({"other.weight": torch.zeros(3)})
            assert problem(await knock(stranger, another.digest, another.to_json())) == "not-a-member"
            assert problem(await knock(members[0], another.digest, another.to_json())) == "wrong-layout"

    asyncio.run(scenario())


def test_a_client_whose_name_only_a_token_may_give_is_told_so_before_the_layout(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            [unbound] = await it.devices(1)
            await it.begin(run_file() + '[coverage]\nsites = ["d0"]\n', small_state())
            another = Layout.of_state({"other.weight": torch.zeros(3)})
            assert problem(await knock(unbound, another.digest, another.to_json())) == "unbound-name"

    asyncio.run(scenario())


def test_a_client_that_another_replica_has_asked_just_now_gets_its_model_here(
    tmp_path: Path, postgresql: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "LOOK_S", 3600.0)  # this replica sees nothing of what the other does by itself

    async def scenario() -> None:
        async with pair(tmp_path, postgresql.new_database()) as (one, other):
            layout = await one.begin(run_file(target=1), small_state())
            [device, stranger] = await one.devices(2)
            there, strange = at(device, other), at(stranger, other)
            await other.progress()  # it knows the run from now on
            assignment = await device.work(layout)
            driver = other.state.coordinator.drivers["demo"]
            assert not driver.knows("d0", assignment["id"])
            await fetched(there, assignment["model"]["sha256"])
            await refused(strange, assignment["model"]["sha256"])

    asyncio.run(scenario())


@pytest.mark.slow
def test_no_link_to_a_bucket_is_made_for_who_may_not_have_the_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        with s3_server() as bucket:
            async with house(tmp_path, **bucket_fields(bucket)) as it:
                layout = await it.begin(run_file(target=1), small_state())
                [device, stranger] = await it.devices(2)
                sha256 = (await device.work(layout))["model"]["sha256"]
                assert (await asked_for(device, sha256)).status_code == 307
                await refused(stranger, sha256)
                assert problem(await asked_for(stranger, sha256, query="?direct=true")) == "unknown-model"

    asyncio.run(scenario())
