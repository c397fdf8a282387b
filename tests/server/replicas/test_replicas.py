"""Three coordinator processes over one PostgreSQL and one blob store; each request goes to any of them.

Whatever dies, stops or is cut off meanwhile: the same model as of one undisturbed process, nothing accepted is lost.
"""

import asyncio
import os
import random
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.federations.federation import Federation, Remembering, Urls, check
from tests.federations.server_device import Json
from tests.servers.killing import Death, of_replicas, resume, start
from tests.servers.ports import own_port
from tests.servers.postgres import Cluster
from tests.servers.waits import LIMIT_S, until
from umbel.server.settings import Settings

pytestmark = pytest.mark.slow
N_REPLICAS = 3
TAKEN_OVER_S = 5.0
OF_CLOSING = ("take the lease to close", "post a partial sum", "make the model", "store the end of an attempt")


class Fleet:
    """The processes. Those that have died stay dead unless they are started again."""

    def __init__(self, settings: Sequence[Settings], death: Death | None) -> None:
        self.settings = settings
        self.processes: list[ForkServerProcess] = [start(one, death) for one in settings]

    def pid(self, i: int) -> int:
        pid = self.processes[i].pid
        assert pid is not None
        return pid

    async def replace(self, i: int) -> None:
        """End one in good order and start it again."""
        self.processes[i].terminate()
        await asyncio.to_thread(self.processes[i].join, LIMIT_S)
        assert self.processes[i].exitcode == 0, self.log(i)
        self.processes[i] = start(self.settings[i])

    def log(self, i: int) -> str:
        return (self.settings[i].data / "log").read_text()[-3000:]

    def logs(self) -> str:
        return "\n\n".join(self.log(i) for i in range(len(self.settings)))

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


Disturbance = Callable[[Fleet, Federation], Coroutine[None, None, None]]


def deaths() -> Iterator[Any]:
    """Before each step and after it. By day one of the two at every second step, in turn."""
    for i, step in enumerate(["carry out Fold", "store what was decided", *OF_CLOSING]):
        for is_before, name in ((True, "before"), (False, "after")):
            at_night = [] if i % 2 == 0 and is_before == (i % 4 == 0) else [pytest.mark.nightly]
            yield pytest.param(step, is_before, id=f"{step}-{name}", marks=at_night)


@pytest.fixture
def settings(postgresql: Cluster, tmp_path: Path) -> list[Settings]:
    return of_replicas(N_REPLICAS, tmp_path, postgresql.empty_database())


async def fare(
    settings: Sequence[Settings],
    disturb: Disturbance | None = None,
    death: Death | None = None,
    seed: int = 0,
    life: type[Federation] = Federation,
) -> tuple[str, list[Json]]:
    """The last model's hash, and the records of a run over these replicas."""
    fleet = Fleet(settings, death)
    urls = Urls([f"http://127.0.0.1:{one.port}" for one in settings], seed)
    try:
        async with httpx.AsyncClient(transport=urls, base_url="http://umbel", timeout=4.0) as http:
            federation = life(http, settings[0])
            running = asyncio.create_task(federation.run())
            disturbing = asyncio.create_task(disturb(fleet, federation)) if disturb else None
            done, _ = await asyncio.wait([running], timeout=LIMIT_S)
            assert done, fleet.logs()
            records = await running
            if disturbing is not None:
                await asyncio.wait_for(disturbing, LIMIT_S)
    finally:
        fleet.end()
    return check(records, federation.accepted), records


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model of one process over SQLite."""
    settings = Settings(data=tmp_path_factory.mktemp("undisturbed"), port=own_port())
    return asyncio.run(fare([settings]))[0]


async def first_report(federation: Federation) -> None:
    await until("an accepted report", lambda: federation.accepted)


def test_replicas_make_the_same_model_as_one_process(settings: list[Settings], undisturbed: str) -> None:
    assert asyncio.run(fare(settings))[0] == undisturbed


@pytest.mark.nightly
def test_what_an_optimizer_remembers_outlives_the_replica_that_made_the_model(
    settings: list[Settings], tmp_path: Path, undisturbed: str
) -> None:
    alone = Settings(data=tmp_path / "alone", port=own_port())
    expected, _ = asyncio.run(fare([alone], life=Remembering))
    died = tmp_path / "died"
    death = Death("make the model", is_before=False, once=died)
    found, _ = asyncio.run(fare(settings, death=death, life=Remembering))
    assert died.exists(), "the step was not done"
    assert found == expected != undisturbed


@pytest.mark.parametrize(("step", "is_before"), [*deaths()])
def test_when_a_replica_is_killed_at_a_step_another_goes_on(
    step: str, is_before: bool, settings: list[Settings], undisturbed: str, tmp_path: Path
) -> None:
    died = tmp_path / "died"
    nth = 2 if step == "carry out Fold" else 1
    model_sha256, records = asyncio.run(fare(settings, death=Death(step, is_before, nth, once=died)))
    assert died.exists(), "the step was not done"
    assert model_sha256 == undisturbed
    if step in OF_CLOSING:
        print(f"{step}: another committed the round after {taken_over_s(died, records):.2f} s")


def taken_over_s(died: Path, records: Sequence[Json]) -> float:
    """From a replica's death to the end of the round that it was to close."""
    died_at = died.stat().st_mtime
    ends = [one["opened_at"] + one["wall_s"] for one in records]
    return float(min(end - died_at for end in ends if end >= died_at))


@pytest.mark.realtime
def test_a_replica_that_dies_as_it_closes_a_round_is_replaced_within_seconds(
    settings: list[Settings], tmp_path: Path
) -> None:
    died = tmp_path / "died"
    _, records = asyncio.run(fare(settings, death=Death("make the model", is_before=True, once=died)))
    assert taken_over_s(died, records) <= TAKEN_OVER_S


@pytest.mark.nightly
@pytest.mark.parametrize(
    "step",
    [
        pytest.param("carry out Fold", marks=pytest.mark.nightly),
        pytest.param("make the model", marks=pytest.mark.nightly),
        pytest.param("decide", marks=pytest.mark.nightly),
        "post a partial sum",
    ],
)
def test_a_replica_that_is_taken_for_dead_and_lives_does_no_harm(
    step: str, settings: list[Settings], undisturbed: str, tmp_path: Path
) -> None:
    stopped = tmp_path / "stopped"

    async def go_on(fleet: Fleet, federation: Federation) -> None:
        await resume(stopped, fleet.settings, fleet.processes)
        assert all(process.is_alive() for process in fleet.processes), fleet.logs()

    death = Death(step, is_before=step != "decide", once=stopped, by=signal.SIGSTOP)
    assert asyncio.run(fare(settings, go_on, death))[0] == undisturbed


def test_a_database_that_restarts_is_found_again(
    settings: list[Settings], undisturbed: str, postgresql: Cluster
) -> None:
    async def restart(fleet: Fleet, federation: Federation) -> None:
        await first_report(federation)
        await asyncio.to_thread(postgresql.restart)
        assert all(process.is_alive() for process in fleet.processes)

    assert asyncio.run(fare(settings, restart))[0] == undisturbed


@pytest.mark.nightly
def test_replicas_restart_one_after_the_other_under_a_run(settings: list[Settings], undisturbed: str) -> None:
    async def roll(fleet: Fleet, federation: Federation) -> None:
        await first_report(federation)
        for i in range(N_REPLICAS):
            await fleet.replace(i)

    assert asyncio.run(fare(settings, roll))[0] == undisturbed


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
def test_a_replica_killed_at_any_moment_is_not_missed(seed: int, settings: list[Settings], undisturbed: str) -> None:
    draw = random.Random(seed)

    async def kill(fleet: Fleet, federation: Federation) -> None:
        await first_report(federation)
        await asyncio.sleep(draw.uniform(0.0, 0.5))
        os.kill(fleet.pid(draw.randrange(N_REPLICAS)), signal.SIGKILL)

    assert asyncio.run(fare(settings, kill, seed=seed))[0] == undisturbed
