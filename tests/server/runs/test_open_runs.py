"""An agent sees the runs that are open to it, at once when they change, and no run that is over."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path

import httpx
import pytest

from tests.federations.consortium import OFFICERS, first_list, signed
from tests.federations.server_device import Device, House, Json, house, problem, run_file, sha256, small_state
from tests.server.devices.test_member_lists import bound_run, list_of, put_run
from tests.server.secure.test_secure_rounds import LAYOUT
from tests.servers.waits import until
from umbel.aggregation.messages import OPEN_RUNS_PAGE_MAX
from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.trust.members import members_bytes
from umbel.server.http.new_run import read_run_file
from umbel.server.runs import open_runs
from umbel.server.runs.open_runs import OpenRunsList

pytestmark = pytest.mark.usefixtures("any_database")


def named(name: str, **changes: int) -> str:
    return run_file(**changes).replace('"demo"', f'"{name}"')


async def begin(it: House, *names: str) -> None:
    model = await it.put_model(small_state())
    for name in names:
        assert (await it.put_run(named(name), model, name)).status_code == 201


async def runs_of(device: Device, query: str = "") -> Json:
    answer = await device.send("GET", f"/v1/runs{query}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def names_in(answer: Json) -> list[str]:
    return [one["name"] for one in answer["runs"]]


async def stop(it: House, name: str) -> None:
    answer = await it.http.post(f"/v1/admin/runs/{name}/stop", json={}, headers=it.admin)
    assert answer.status_code == 200, answer.text


async def held_of(it: House, device: Device, mark: str) -> "asyncio.Task[Json]":
    """A request that the coordinator holds open."""
    asked = asyncio.create_task(runs_of(device, f"?mark={mark}&wait_s=30"))
    await until("a held request", lambda: it.state.open_runs._n_held == 1 or asked.done())
    assert not asked.done()
    return asked


def test_a_run_is_described_as_its_site_must_know_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            [device] = await it.devices(1)
            await it.begin(run_file(count=7, minimum=2), small_state())
            [run] = (await runs_of(device))["runs"]
            driver = await it.driver()
            assert run.pop("created_at") == driver.run.created_at
            assert run == {
                "name": "demo",
                "status": "running",
                "rounds": 7,
                "minimum": 2,
                "n_values": Layout.of_state(small_state()).update.n_values,
                "model_sha256": sha256(encode_model(small_state())),
                "run_file_sha256": driver.run.file_sha256,
                "members_sha256": "",
                "is_secure": False,
                "is_private": False,
            }

    asyncio.run(scenario())


def masked(more: str) -> RunFile:
    """A run of secure rounds, with sums of 5 or more."""
    text = f'name = "demo"\nrounds = {{ count = 3, target = 6, minimum = 5, over_selection = 1.0 }}\n{more}'
    return read_run_file(text.encode())


@pytest.mark.parametrize(
    ("more", "fewest"),
    [
        ("[secure_aggregation]\n", 5),
        ("[secure_aggregation]\nevaluation = ['accuracy']\n[evaluation]\nevery = 1\nclients = 4\n", 4),
        ("[secure_aggregation]\nevaluation = ['accuracy']\n[evaluation]\nevery = 1\nclients = 9\n", 5),
        ("[secure_aggregation]\n[[override]]\nfirst_round = 2\ntarget = 4\nminimum = 4\n", 4),
        ("[evaluation]\nevery = 1\nclients = 3\n", 5),
    ],
)
def test_the_fewest_clients_are_those_of_the_smallest_sum_that_the_coordinator_will_see(more: str, fewest: int) -> None:
    file = masked(more)
    assert open_runs.fewest_clients(file) == fewest
    if file.secure:
        plans = [file.first_plan(10), *(file.round_plan(number, 1) for number in (1, 2, 3))]
        plans += [file.evaluation_plan(number) for number in (1, 2, 3) if file.evaluates_after(number)]
        assert min(plan.minimum for plan in plans) == fewest, "a site refuses a sum of fewer"


def test_a_run_is_listed_until_it_is_over_and_its_status_changes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            [device] = await it.devices(1)
            await begin(it, "one", "two")
            first = await runs_of(device)
            assert names_in(first) == ["one", "two"]
            pause = await it.http.post("/v1/admin/runs/one/pause", json={}, headers=it.admin)
            assert pause.status_code == 200
            paused = await runs_of(device, f"?mark={first['mark']}&wait_s=30")
            assert [one["status"] for one in paused["runs"]] == ["paused", "running"]
            await stop(it, "one")
            assert names_in(await runs_of(device, f"?mark={paused['mark']}&wait_s=30")) == ["two"]

    asyncio.run(scenario())


def _changes(it: House) -> dict[str, Coroutine[object, object, None]]:
    return {"a new run": begin(it, "two"), "the end of one": stop(it, "one")}


@pytest.mark.parametrize(("what", "names"), [("a new run", ["one", "two"]), ("the end of one", [])])
def test_a_held_request_is_answered_at_once(tmp_path: Path, what: str, names: list[str]) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            [device] = await it.devices(1)
            await begin(it, "one")
            asked = await held_of(it, device, (await runs_of(device))["mark"])
            changes = _changes(it)
            await changes.pop(what)
            for unused in changes.values():
                unused.close()
            await until("the answer", asked.done)
            assert names_in(asked.result()) == names

    asyncio.run(scenario())


def test_without_a_change_the_answer_comes_when_the_time_is_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            [device] = await it.devices(1)
            first = await runs_of(device)
            assert (first["runs"], first["next"]) == ([], "")
            assert await runs_of(device, f"?mark={first['mark']}&wait_s=0.05") == first

    asyncio.run(scenario())


def test_a_run_with_a_member_list_is_shown_to_its_members_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            *members, stranger = await it.devices(4)
            listed = list_of(*members)
            assert (await put_run(it, bound_run(listed), None)).status_code == 201
            assert names_in(await runs_of(stranger)) == ["demo"], "nobody has given the list yet"
            before = await runs_of(stranger)
            text = members_bytes(signed(listed, *OFFICERS)).decode()
            assert (await put_run(it, bound_run(listed), text)).status_code == 200
            assert names_in(await runs_of(stranger, f"?mark={before['mark']}&wait_s=30")) == []
            [run] = (await runs_of(members[0]))["runs"]
            assert (run["members_sha256"], run["is_secure"]) == (listed.sha256, True)
            assert listed.sha256 != first_list().sha256
            answer = await stranger.check_in(LAYOUT, wait_s=0.0, sample_count=0)
            assert problem(answer) == "not-a-member", "a check-in has the same rule"

    asyncio.run(scenario())


def test_pages_come_one_after_the_other_with_one_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_runs, "OPEN_RUNS_PAGE_MAX", 2)

    async def scenario() -> None:
        async with house(tmp_path) as it:
            [device] = await it.devices(1)
            await begin(it, "d", "a", "c", "b", "e")
            found, after, marks = list[str](), "", set[str]()
            for _ in range(3):
                page = await runs_of(device, f"?after={after}")
                found, after = found + names_in(page), page["next"]
                marks.add(page["mark"])
            assert (found, after, len(marks)) == (["a", "b", "c", "d", "e"], "", 1)
            assert OPEN_RUNS_PAGE_MAX == 100

    asyncio.run(scenario())


def test_of_too_many_agents_the_last_ones_are_sent_away_for_a_while(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            it.state.open_runs = OpenRunsList(it.state.coordinator, held_max=1)
            one, other = await it.devices(2)
            mark = (await runs_of(one))["mark"]
            asked = await held_of(it, one, mark)
            assert (await runs_of(other, f"?mark={mark}&wait_s=30"))["retry_after_s"] == open_runs.AWAY_S
            asked.cancel()

    asyncio.run(scenario())


def test_a_removed_client_is_told_so_while_it_waits(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            [device] = await it.devices(1)
            mark = (await runs_of(device))["mark"]
            asked = asyncio.create_task(device.send("GET", f"/v1/runs?mark={mark}&wait_s=30"))
            await until("a held request", lambda: it.state.open_runs._n_held == 1)
            removed = await it.http.delete(f"/v1/admin/clients/{device.name}", headers=it.admin)
            assert removed.status_code == 204
            await until("the answer", asked.done)
            assert problem(asked.result()) == "client-removed"

    asyncio.run(scenario())


@pytest.mark.parametrize("query", ["?wait_s=31", "?wait_s=nan", f"?mark={'a' * 65}", f"?after={'a' * 64}"])
def test_a_query_beyond_its_bounds_is_refused(tmp_path: Path, query: str) -> None:
    async def scenario() -> None:
        async with house(tmp_path) as it:
            [device] = await it.devices(1)
            answer: httpx.Response = await device.send("GET", f"/v1/runs{query}")
            assert problem(answer) == "malformed-request"

    asyncio.run(scenario())
