"""A secure run from a model that another secure run trains is refused, before any site declines it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.federations.secure_cohort import STATE, Attempt, secure_run
from tests.federations.secure_device import SecureDevice
from tests.federations.server_device import House, LateClock, house, problem, run_file

pytestmark = pytest.mark.usefixtures("any_database_in_time")


def named(text: str, name: str = "second") -> str:
    """This run file under another name."""
    return text.replace('"demo"', f'"{name}"')


async def refused(it: House, model: str) -> bool:
    """Whether the coordinator refuses a second secure run from this model because of the first."""
    answer = await it.put_run(named(secure_run()), model, name="second")
    if answer.status_code == 201:
        return False
    assert (answer.status_code, problem(answer)) == (409, "first-model-in-use")
    assert "the secure run 'demo' trains this first model too" in answer.json()["detail"]
    assert "umbel model init --seed" in answer.json()["detail"]
    return True


async def commit_one_round(it: House) -> str:
    """Play one secure round of the run; returns the hash of the model that it made."""
    first = Attempt.of(it, LateClock(), await it.devices(4, sample_count=0))
    await first.each(SecureDevice.begin)
    await first.go()
    [record] = await it.ended(1)
    assert record["committed"], record["reason"]
    return str(record["model_sha256"])


def play(tmp_path: Path, scenario: Callable[[House, str], Awaitable[None]], first: str) -> None:
    """Run a scenario in a house whose run `demo` has the file `first`. The scenario also gets its first model."""

    async def playing() -> None:
        async with house(tmp_path, LateClock()) as it:
            await it.begin(first, STATE)
            await scenario(it, await it.put_model(STATE))

    asyncio.run(playing())


def test_a_run_that_is_under_way_keeps_its_first_model_for_itself_until_it_is_stopped(tmp_path: Path) -> None:
    async def scenario(it: House, model: str) -> None:
        assert await refused(it, model)
        assert (await it.put_run(secure_run(), model)).status_code == 200, "the same run again is no second run"
        await it.http.post("/v1/admin/runs/demo/stop", headers=it.admin)
        assert not await refused(it, model), "no sum over this model was ever unmasked"

    play(tmp_path, scenario, secure_run())


def test_a_model_that_a_round_was_committed_from_stays_refused_and_the_newest_one_is_free(tmp_path: Path) -> None:
    async def scenario(it: House, model: str) -> None:
        newest = await commit_one_round(it)
        assert (await it.http.get("/v1/admin/runs/demo", headers=it.admin)).json()["status"] == "finished"
        assert await refused(it, model)
        assert not await refused(it, newest)

    play(tmp_path, scenario, secure_run(count=1))


def test_a_later_model_that_the_run_trains_now_is_refused_too(tmp_path: Path) -> None:
    async def scenario(it: House, model: str) -> None:
        newest = await commit_one_round(it)
        assert await refused(it, newest)
        assert await refused(it, model)

    play(tmp_path, scenario, secure_run(count=2))


def test_of_two_secure_runs_created_at_the_same_time_the_coordinator_takes_one(tmp_path: Path) -> None:
    async def scenario(it: House, model: str) -> None:
        await it.http.post("/v1/admin/runs/demo/stop", headers=it.admin)
        names = [f"run-{i}" for i in range(4)]
        answers = await asyncio.gather(*(it.put_run(named(secure_run(), one), model, name=one) for one in names))
        assert sorted(one.status_code for one in answers) == [201, 409, 409, 409]

    play(tmp_path, scenario, secure_run())


@pytest.mark.parametrize(
    ("first", "second"),
    [(run_file(), secure_run()), (secure_run(), run_file())],
    ids=["after a plain run", "a plain run"],
)
def test_a_plain_run_reveals_nothing_that_a_mask_hides(tmp_path: Path, first: str, second: str) -> None:
    async def scenario(it: House, model: str) -> None:
        assert (await it.put_run(named(second), model, name="second")).status_code == 201

    play(tmp_path, scenario, first)


def test_an_operator_who_knows_that_the_clients_will_be_the_same_can_allow_it(tmp_path: Path) -> None:
    async def scenario(it: House, model: str) -> None:
        assert await refused(it, model)
        headers = {**it.admin, "Content-Type": "application/toml"}
        address = f"/v1/admin/runs/second?model={model}&same_first_model=true"
        answer = await it.http.put(address, content=named(secure_run()), headers=headers)
        assert answer.status_code == 201, answer.text
        assert (await it.put_run(named(secure_run()), model, name="second")).status_code == 200

    play(tmp_path, scenario, secure_run())
