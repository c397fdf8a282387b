"""Secure rounds over three coordinator processes, one PostgreSQL and one blob store; each request goes to any of them.

Whichever dies, and whenever: the same model as of one undisturbed process, and no share that anybody could read.
"""

import asyncio
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.federations.secure_federation import InTurn, SecureFederation
from tests.servers.killing import SECURE_STEPS, Death, of_replicas, resume, start
from tests.servers.ports import own_port
from tests.servers.postgres import Cluster
from tests.servers.waits import LIMIT_S
from umbel.server.settings import Settings

pytestmark = pytest.mark.slow
N_REPLICAS = 3


async def fare(settings: Sequence[Settings], death: Death | None = None, seed: int = 0) -> str:
    """The last model's hash. Who is stopped, not killed, goes on later."""
    processes = [start(one, death) for one in settings]
    urls = InTurn([f"http://127.0.0.1:{one.port}" for one in settings], seed)
    try:
        async with httpx.AsyncClient(transport=urls, base_url="http://umbel", timeout=12.0) as http:
            federation = SecureFederation(http, settings[0])
            running = asyncio.create_task(federation.run())
            if death is not None and death.by is signal.SIGSTOP and death.once is not None:
                await resume(death.once, settings, processes)
            done, _ = await asyncio.wait([running], timeout=LIMIT_S)
            assert done, "\n\n".join((one.data / "log").read_text()[-3000:] for one in settings)
            return federation.check(await running)
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model of one process over SQLite."""
    return asyncio.run(fare([Settings(data=tmp_path_factory.mktemp("undisturbed"), port=own_port())]))


@pytest.fixture
def settings(postgresql: Cluster, tmp_path: Path) -> list[Settings]:
    return of_replicas(N_REPLICAS, tmp_path, postgresql.new_database())


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_replicas_make_the_same_model_as_one_process(seed: int, settings: list[Settings], undisturbed: str) -> None:
    assert asyncio.run(fare(settings, seed=seed)) == undisturbed


def deaths() -> Iterator[Any]:
    """Before a step and after the next, in turn. By day every sixth."""
    places = [*((step, i % 2 == 0) for i, step in enumerate(SECURE_STEPS)), ("open what was handed over", False)]
    for i, (step, is_before) in enumerate(places):
        at_night = [pytest.mark.nightly] if i % 6 else []
        yield pytest.param(step, is_before, id=f"{step}-{'before' if is_before else 'after'}", marks=at_night)


@pytest.mark.parametrize(("step", "is_before"), [*deaths()])
def test_when_a_replica_is_killed_at_a_step_another_goes_on(
    step: str, is_before: bool, settings: list[Settings], undisturbed: str, tmp_path: Path
) -> None:
    died = tmp_path / "died"
    assert asyncio.run(fare(settings, Death(step, is_before, once=died))) == undisturbed
    assert died.exists(), "the step was not done"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "step", ["open what was handed over", pytest.param("make the secrets", marks=pytest.mark.nightly)]
)
def test_a_replica_that_is_taken_for_dead_and_lives_does_no_harm(
    step: str, settings: list[Settings], undisturbed: str, tmp_path: Path
) -> None:
    stopped = tmp_path / "stopped"
    assert asyncio.run(fare(settings, Death(step, is_before=True, once=stopped, by=signal.SIGSTOP))) == undisturbed
    assert stopped.exists(), "the step was not done"
