"""A run that was given its member list draws members alone, and tells everybody else what to do."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from tests.federations.consortium import OFFICERS, first_list, public_key, signed
from tests.federations.secure_device import SecureDevice
from tests.federations.server_device import Device, House, UntimedClock, house, problem
from tests.server.replicas.test_replicas_together import at
from tests.server.secure.test_secure_rounds import LAYOUT, STATE, secure_run
from tests.servers.waits import LIMIT_S, until
from umbel.aggregation.trust.members import FILE_BYTES_MAX, MemberList, members_bytes
from umbel.aggregation.trust.public_keys import public_key_text
from umbel.aggregation.types import RunId
from umbel.server.http.limits import RUN_BYTES_MAX, RUN_FILE_BYTES_MAX

pytestmark = pytest.mark.usefixtures("any_database")
DEMO = RunId("demo")


def list_of(*devices: Device) -> MemberList:
    keys = {one.name: public_key_text(one.key.public_key().public_bytes_raw()) for one in devices}
    return replace(first_list(), members=keys)


def bound_run(members: MemberList, **changes: int) -> str:
    return f'{secure_run(**changes)}members_sha256 = "{members.sha256}"\n'


def text_of(members: MemberList) -> str:
    return members_bytes(signed(members, *OFFICERS)).decode()


async def put_run(it: House, run_file: str, members: str | None) -> httpx.Response:
    """Create the run as JSON, which has room for a list."""
    model, order = await it.put_model(STATE), {"run_file": run_file, "members": members}
    return await it.http.put(f"/v1/admin/runs/demo?model={model}", json=order, headers=it.admin)


async def away(it: House) -> dict[str, str]:
    return {one["client"]: one["reason"] for one in (await it.progress())["turned_away"]}


async def told(device: Device) -> str:
    """What a client that is no member is told at its check-in."""
    answer = await device.check_in(LAYOUT, wait_s=0.0, sample_count=0)
    assert problem(answer) == "not-a-member"
    assert answer.status_code == 403
    return str(answer.json()["detail"])


@pytest.mark.parametrize(("n_members", "status"), [(0, 422), (2, 422), (3, 201)])
def test_a_list_with_fewer_members_than_a_round_needs_is_refused(tmp_path: Path, n_members: int, status: int) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            devices = await it.devices(n_members, sample_count=0) if n_members else []
            listed = list_of(*devices)
            answer = await put_run(it, bound_run(listed, target=3, minimum=3), text_of(listed))
            assert answer.status_code == status
            assert ("rounds.minimum asks for 3" in answer.text) is (status != 201)

    asyncio.run(scenario())


def test_a_stranger_is_told_at_its_check_in_and_the_members_rounds_close(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            *members, stranger = await it.devices(5, sample_count=0)
            listed = list_of(*members)
            assert (await put_run(it, bound_run(listed, count=2), text_of(listed))).status_code == 201
            for number in (1, 2):
                reason = await told(stranger)
                assert (
                    "epoch 1 of the member list 'pilot', and 'd4' is not one of them. Take part in another run"
                    in reason
                )
                assert "or ask an officer to add its name and key" in reason
                parties = [SecureDevice(one, LAYOUT) for one in members]
                await asyncio.gather(*(one.take_part(torch.zeros(LAYOUT.n_values)) for one in parties))
                record = (await it.ended(number))[-1]
                assert record["committed"], record["reason"]
                assert [one["client"] for one in record["clients"]] == ["d0", "d1", "d2", "d3"]
            assert (await away(it)).keys() == {"d4"}

    asyncio.run(scenario())


def test_a_members_name_with_another_key_is_a_stranger_too(tmp_path: Path) -> None:
    """The sites compare the key that the cohort shows for a name, which is the one that was enrolled."""

    async def scenario() -> None:
        async with house(tmp_path) as it:
            devices = await it.devices(4, sample_count=0)
            listed = list_of(*devices)
            listed = replace(listed, members={**listed.members, "d0": public_key("another")})
            assert (await put_run(it, bound_run(listed), text_of(listed))).status_code == 201
            assert "'d0' is enrolled with another key than the list has" in await told(devices[0])
            for one in devices[1:]:
                assert (await one.check_in(LAYOUT, wait_s=0.0, sample_count=0)).status_code == 200
            waiting = await (await it.driver()).waiting.candidates()
            assert sorted(one.client for one in waiting) == ["d1", "d2", "d3"]

    asyncio.run(scenario())


def test_without_the_list_nobody_is_turned_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            *members, stranger = await it.devices(5, sample_count=0)
            assert (await put_run(it, bound_run(list_of(*members)), None)).status_code == 201
            assert (await stranger.check_in(LAYOUT, wait_s=0.0, sample_count=0)).status_code == 200

    asyncio.run(scenario())


def test_a_run_may_be_given_its_list_later_and_who_waits_already_is_not_drawn(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path, UntimedClock()) as it:
            *members, stranger = await it.devices(5, sample_count=0)
            listed = list_of(*members)
            run_file = bound_run(listed)
            await it.begin(run_file, STATE)
            driver = await it.driver()
            held = asyncio.create_task(stranger.check_in(LAYOUT, wait_s=20.0, sample_count=0))
            await until("a request that waits", lambda: driver.bells.is_heard("d4"))
            assert [one.client for one in await driver.waiting.candidates()] == ["d4"]
            for _ in range(2):  # the same again is the same
                assert (await put_run(it, run_file, text_of(listed))).status_code == 200
                assert await driver.waiting.candidates() == ()
            assert problem(await asyncio.wait_for(held, LIMIT_S)) == "not-a-member"
            assert (await away(it)).keys() == {"d4"}
            parties = [SecureDevice(one, LAYOUT) for one in members]
            await asyncio.gather(*(one.take_part(torch.zeros(LAYOUT.n_values)) for one in parties))
            [record] = await it.ended(1)
            assert record["committed"], record["reason"]
            await told(stranger)

    asyncio.run(scenario())


def test_a_new_run_has_its_list_from_its_first_moment(tmp_path: Path) -> None:
    """In one transaction: a crash after it, or a replica that opens the run at once, finds both."""

    async def scenario() -> None:
        async with house(tmp_path) as it:

            async def later(*_: object) -> None:
                raise AssertionError("it was stored with the run")

            it.state.services.member_lists.add = later
            assert (await put_run(it, bound_run(MEMBERS), text_of(MEMBERS))).status_code == 201
            assert await it.state.services.member_lists.of(DEMO) == MEMBERS

    asyncio.run(scenario())


def test_the_list_outlives_a_restart_and_repeating_the_run_without_it_takes_nothing_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            *members, stranger = await it.devices(5, sample_count=0)
            listed, url = list_of(*members), it.settings.database_url
            assert (await put_run(it, bound_run(listed), text_of(listed))).status_code == 201
        async with house(tmp_path, database_url=url) as it:
            assert (await it.put_run(bound_run(listed), await it.put_model(STATE))).status_code == 200
            await told(at(stranger, it))
            assert (await at(members[0], it).check_in(LAYOUT, wait_s=0.0, sample_count=0)).status_code == 200

    asyncio.run(scenario())


MEMBERS = first_list()
LONG = f"{bound_run(MEMBERS)}# {'x' * RUN_FILE_BYTES_MAX}"
OTHER = replace(MEMBERS, name="other")
REFUSED: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "another list": (
        lambda: _order(bound_run(MEMBERS), text_of(OTHER)),
        "malformed-request",
        f'write members_sha256 = "{OTHER.sha256}" into its section [secure_aggregation]',
    ),
    "a list where the file names none": (
        lambda: _order(secure_run(), text_of(MEMBERS)),
        "malformed-request",
        f'names no member list; to use {MEMBERS.words}, write members_sha256 = "{MEMBERS.sha256}"',
    ),
    "what is no list": (
        lambda: _order(bound_run(MEMBERS), "{}"),
        "malformed-request",
        "members: this is not a member list",
    ),
    "a list with a key twice": (
        lambda: _order(bound_run(MEMBERS), text_of(MEMBERS).replace('"list"', '"signatures": {}, "list"')),
        "malformed-request",
        "members: this is not a member list",
    ),
    "a list that is too long": (
        lambda: _order(bound_run(MEMBERS), text_of(MEMBERS) + " " * FILE_BYTES_MAX),
        "malformed-request",
        "it has more than 1000000 bytes",
    ),
    "a misspelt key": (
        lambda: json.dumps({"run_file": bound_run(MEMBERS), "member": text_of(MEMBERS)}).encode(),
        "malformed-request",
        "member: Unexpected keyword argument",
    ),
    "a run file that is too long": (lambda: _order(LONG, None), "body-too-large", "at most 16384 are allowed"),
    "more than both may have": (lambda: b" " * (RUN_BYTES_MAX + 1), "body-too-large", "this address accepts at most"),
}


def _order(run_file: str, members: str | None) -> bytes:
    return json.dumps({"run_file": run_file, "members": members}).encode()


def test_what_is_not_the_runs_list_is_refused_and_nothing_is_stored(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            url = f"/v1/admin/runs/demo?model={await it.put_model(STATE)}"
            headers = {**it.admin, "Content-Type": "application/json; charset=utf-8"}
            for name, (body, kind, sentence) in REFUSED.items():
                answer = await it.http.put(url, content=body(), headers=headers)
                assert problem(answer) == kind, name
                assert sentence in answer.json()["detail"], name
            assert (await it.http.get("/v1/admin/runs", headers=it.admin)).json() == []
            assert await it.state.services.member_lists.of(DEMO) is None

    asyncio.run(scenario())


def test_the_longest_list_is_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            text = text_of(MEMBERS)
            padded = text + "\n" * (FILE_BYTES_MAX - len(text))  # each of which is two bytes of JSON
            assert (await put_run(it, bound_run(MEMBERS), padded)).status_code == 201
            assert await it.state.services.member_lists.of(DEMO) == MEMBERS

    asyncio.run(scenario())
