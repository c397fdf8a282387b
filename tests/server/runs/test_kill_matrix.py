"""kill -9 before and after every step, over SQLite and PostgreSQL: the same model, and nothing accepted is lost.

Two federations go through it: one whose rounds only train (`federation.py`), and one that has every kind of round and
every order of an operator (`whole_life.py`). The processes of the matrix have imported everything when they start; the
cold restart measures one that has not. A federation dies before a step and, once it has come back, after it, so that a
case is two deaths: a restart costs less than another federation.
"""

import asyncio
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, pairwise, product
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.federations.federation import Federation, answered, check
from tests.federations.whole_life import WholeLife
from tests.server.serve.test_process import SERVE
from tests.servers.killing import COMMANDS, ENDINGS, LIFE_STEPS, NEVER, ORDERS, STEPS, Death, start
from tests.servers.ports import own_port
from tests.servers.postgres import Cluster
from tests.servers.waits import LIMIT_S, until
from umbel.aggregation.plans.round import Task
from umbel.aggregation.trust.public_keys import public_key_bytes
from umbel.client.operator.audit import download, verify
from umbel.client.operator.operator import Operator
from umbel.server.settings import Settings

pytestmark = pytest.mark.slow
RESTART_S = 5.0
OF_OTHERS = {
    "post a partial sum",  # `test_replicas.py` has it
    "carry out Announce",  # `test_secure_kills.py` has it
}
# The first time is not the most interesting one. What is stored in batches is done fewer times on a crowded machine:
# who waits perhaps once, for all of them come together.
_NTH = {
    "store nonces": 5,
    "put a blob": 5,  # the first two mark the store as this database's
    "store a chunk": 2,
    "keep a file of the model": 3,  # the first is version 0's master copy; then the published model, its master copy
    "decide": 5,
    "store what was decided": 6,
    "carry out Fold": 2,
    "carry out Answer": 2,
}


_ONCE = {  # a process that comes back has nothing of the kind left to do: two runs for these
    "store who waits",
    "carry out Discard",
    *(f"carry out {what} of {kind}" for what in ("Release", "Commit", "Discard") for kind in ("evaluation", "canary")),
}


def deaths_of(step: str) -> Mapping[str, tuple[Death, ...]]:
    """What the processes of a run die of in turn, by name: before the step and, once it is taken up again, after it."""
    before, after = Death(step, True, _NTH.get(step, 1)), Death(step, False)
    if step in _ONCE:
        return {f"{step}, before": (before,), f"{step}, after": (replace(before, is_before=False),)}
    return {step: (Death("carry out Fold", False, 2), before, after) if step.startswith("adopt") else (before, after)}


def patience_s() -> float:
    """How long a restart may take: five seconds, or on a slow or crowded machine four times what a bare start of Python
    with the coordinator's libraries takes there at this moment.
    """
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import umbel.server.serve.process"], check=True)
    return max(RESTART_S, 4 * (time.monotonic() - began))


@dataclass
class Outcome:
    """How a federation has fared. `restart_s`: from each start after a death to the next accepted report."""

    model_sha256: str
    n_deaths: int
    restart_s: list[float]


class Keeper:
    """Keeps a coordinator running: when it has died, another is started, until the deaths are used up."""

    def __init__(self, settings: Settings, deaths: tuple[Death, ...]) -> None:
        self._settings = settings
        self._deaths = iter([*deaths, None])
        self.started: list[float] = []
        self.process = self._start()

    def _start(self) -> ForkServerProcess:
        self.started.append(time.monotonic())
        return start(self._settings, next(self._deaths))

    async def keep(self) -> None:
        while True:
            if not self.process.is_alive():
                assert self.process.exitcode == -signal.SIGKILL, (self._settings.data / "log").read_text()[-3000:]
                self.process = self._start()
            await asyncio.sleep(0.01)

    def stop(self) -> None:
        self.process.terminate()
        self.process.join(LIMIT_S)
        assert self.process.exitcode == 0, (self._settings.data / "log").read_text()[-3000:]


def audit(settings: Settings, n_attempts: int) -> None:
    """Follow the run's chain from its creation to its head: every attempt is in it, once, signed."""
    url, key = f"http://127.0.0.1:{settings.port}", settings.admin_key_path.read_text().strip()
    with Operator(url, key) as operator:
        auditor, lines = verify(download(operator, "demo"), [public_key_bytes(operator.audit_key())])
        assert len(lines) == 1 + n_attempts
        assert auditor.n_reports_unsigned == 0
        assert operator.run("demo").audit_head == auditor.head


async def fare(settings: Settings, deaths: tuple[Death, ...], life: type[Federation]) -> Outcome:
    keeper = Keeper(settings, deaths)
    keeping = asyncio.create_task(keeper.keep())
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.port}", timeout=10.0) as http:
            federation = life(http, settings)
            running = asyncio.create_task(federation.run())
            done, _ = await asyncio.wait([keeping, running], timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            assert running in done, (settings.data / "log").read_text()[-3000:]
            records = await running
            await answered(lambda: http.get("/v1/health"))  # it may have died of the last step of all
            await asyncio.to_thread(audit, settings, len(records))
    finally:
        keeping.cancel()
        keeper.stop()
    reports = sorted(one.at for one in federation.accepted)
    lives = pairwise([*keeper.started[1:], math.inf])
    nexts = [next((at - began for at in reports if began < at < ended), None) for began, ended in lives]
    sha256 = federation.check(records)
    return Outcome(sha256, len(keeper.started) - 1, [one for one in nexts if one is not None])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[type[Federation], str]:
    """The models of runs that nothing disturbs."""
    models: dict[type[Federation], str] = {}
    for life in (Federation, WholeLife):
        settings = Settings(data=tmp_path_factory.mktemp("undisturbed"), port=own_port())
        models[life] = asyncio.run(fare(settings, (), life)).model_sha256
    return models


@pytest.fixture
def settings(request: pytest.FixtureRequest, database: str, tmp_path: Path) -> Settings:
    url = None
    if database == "postgresql":
        cluster: Cluster = request.getfixturevalue("postgresql")
        url = cluster.new_database()
    return Settings(data=tmp_path, port=own_port(), database_url=url)


@pytest.mark.realtime
def test_a_cold_restart_takes_reports_again(tmp_path: Path, undisturbed: dict[type[Federation], str]) -> None:
    """Of a process as an operator starts it, its imports included."""
    settings = Settings(data=tmp_path, port=own_port())
    command = [sys.executable, "-c", SERVE, "--data", str(tmp_path), "--port", str(settings.port)]

    def serve() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    async def scenario() -> tuple[float, str]:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.port}", timeout=10.0) as http:
            federation = Federation(http, settings)
            first = serve()
            running = asyncio.create_task(federation.run())
            await until("two accepted reports", lambda: len(federation.accepted) >= 2)
            first.kill()
            first.wait()
            n_accepted, began = len(federation.accepted), time.monotonic()
            second = serve()
            try:
                records = await asyncio.wait_for(running, LIMIT_S)
            finally:
                second.kill()
                second.wait()
            return federation.accepted[n_accepted].at - began, check(records, federation.accepted)

    took_s, model_sha256 = asyncio.run(scenario())
    print(f"cold restart to the next accepted report: {took_s:.2f} s")
    assert model_sha256 == undisturbed[Federation]
    assert took_s <= RESTART_S or took_s <= patience_s()


def test_every_command_of_every_kind_of_round_every_order_and_every_ending_is_in_the_matrix() -> None:
    steps = [*STEPS.values(), *LIFE_STEPS.values()]
    carried_out = {(step.takes, step.task) for step in steps if step.method == "carry_out"}
    assert carried_out == set(product(COMMANDS, Task)) - NEVER
    assert {step.takes for step in steps if step.method == "obey"} == set(ORDERS)
    assert {"_committed", "_evaluated", "_tried_out", "rolled_back", "abandoned"} <= set(ENDINGS)
    assert set(ENDINGS) <= {step.method for step in steps}


_LIFE_BY_DAY = {"obey Rollback", "decide how it was rolled_back", "decide how it was abandoned"}


def matrix() -> Iterator[Any]:
    """Over the one database and the other in turn. At night the short lives change places, and come to every step; the
    long ones have the other orders and endings, and the commands of evaluations and canaries.
    """
    turns = {is_long: cycle(["sqlite", "postgresql"]) for is_long in (False, True)}
    by_day = cycle([True, False, False, True])  # two of four, over either database
    for step in (step for step in (*STEPS, *LIFE_STEPS) if step not in OF_OTHERS):
        for name, deaths in deaths_of(step).items():
            database = next(turns[step in LIFE_STEPS])
            is_by_day = step in _LIFE_BY_DAY if step in LIFE_STEPS else next(by_day)
            at_night = [] if is_by_day else [pytest.mark.nightly]
            yield pytest.param(deaths, database, id=f"{database}-{name}", marks=at_night)
            if step in STEPS:
                other = "sqlite" if database == "postgresql" else "postgresql"
                yield pytest.param(deaths, other, id=f"{other}-{name}", marks=pytest.mark.nightly)


@pytest.mark.parametrize(("deaths", "database"), [*matrix()])
def test_killed_before_a_step_and_after_it_it_goes_on_to_the_same_model(
    deaths: tuple[Death, ...], settings: Settings, undisturbed: dict[type[Federation], str]
) -> None:
    life = WholeLife if deaths[-1].step in LIFE_STEPS else Federation
    outcome = asyncio.run(fare(settings, deaths, life))
    assert outcome.n_deaths == len(deaths), "the step was not done"
    assert outcome.model_sha256 == undisturbed[life]
    print(f"restart to the next accepted report: {outcome.restart_s} s")
