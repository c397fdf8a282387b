"""Real clients and a real coordinator in one process: two sums over one model, and what they tell together."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import torch
from torch import nn

from tests.federations.lifecycle_house import obeyed
from tests.federations.server_device import House, Json, house, run_file
from tests.servers.waits import LIMIT_S
from tests.suite.nights import at_night
from umbel.client import Client, LocalPlan, RunEnd, TrainResult, run_client
from umbel.client.rounds.shutdown import Shutdown

pytestmark = pytest.mark.slow
SECURE = '[codec]\nname = "integer"\nstep = 0.01\nfirst_norm = 3.0\n[secure_aggregation]\nexpected_sample_count = 4\n'
SAMPLES = {"anna": 2, "bert": 3, "cora": 5, "dora": 7, "east": 11}
STAYING = ("anna", "bert", "cora", "dora")


class Ward(Client):
    """Adds its own number to every weight; a hundred times as much after its first round, if it is `steep`."""

    def __init__(self, samples: int, is_steep: bool = False) -> None:
        self.model, self.sample_count = nn.Linear(30, 10), samples
        self.is_steep, self.shutdown = is_steep, Shutdown()
        self.seeds: list[int] = []

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        factor = 100 if self.is_steep and self.seeds else 1
        self.seeds.append(plan.seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(factor * self.sample_count / 1000)
        return TrainResult(self.sample_count, 1, 1)


class Leaving(Ward):
    """Leaves when its first sum is opened."""

    def train(self, model: nn.Module, plan: LocalPlan) -> TrainResult:
        self.shutdown.request("it has seen enough")
        return super().train(model, plan)


class Bridge(httpx.BaseTransport):
    """From a client's thread to the coordinator's event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, it: House) -> None:
        self._loop, self._asgi = loop, httpx.ASGITransport(it.app, raise_app_exceptions=False)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return asyncio.run_coroutine_threadsafe(self._pass_on(request, request.read()), self._loop).result()

    async def _pass_on(self, request: httpx.Request, body: bytes) -> httpx.Response:
        passed = httpx.Request(request.method, request.url, headers=request.headers, content=body)
        answer = await self._asgi.handle_async_request(passed)
        raw = b"".join([piece async for piece in answer.aiter_raw()])
        return httpx.Response(answer.status_code, headers=answer.headers, stream=httpx.ByteStream(raw))


class Sites:
    """Sites without a policy, each in a thread."""

    def __init__(self, it: House, directory: Path, apps: Mapping[str, Ward]) -> None:
        self.it, self.directory, self.apps = it, directory, apps
        self.ends: dict[str, RunEnd] = {}
        self._threads: list[threading.Thread] = []

    async def start(self) -> None:
        loop, tokens = asyncio.get_running_loop(), await self.it.tokens(len(self.apps))
        for name, token in zip(self.apps, tokens, strict=True):
            thread = threading.Thread(target=self._run, args=(name, token, Bridge(loop, self.it)), daemon=True)
            self._threads.append(thread)
            thread.start()

    async def join(self) -> None:
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _run(self, name: str, token: str, bridge: Bridge) -> None:
        app, state = self.apps[name], self.directory / name
        self.ends[name] = run_client(
            app, "http://umbel", state, "demo", token, name, transport=bridge, shutdown=app.shutdown
        )


@asynccontextmanager
async def federation(tmp_path: Path, apps: Mapping[str, Ward], count: int) -> AsyncGenerator[tuple[House, Sites]]:
    """All of them take part from now on, until the run is over."""
    text = run_file(count=count, target=len(apps), minimum=3, over_selection=1.0, window_s=60.0) + SECURE
    start = {name: torch.zeros_like(values) for name, values in nn.Linear(30, 10).state_dict().items()}
    async with house(tmp_path / "coordinator") as it:
        await it.begin(text, start)
        sites = Sites(it, tmp_path, apps)
        await sites.start()
        try:
            async with asyncio.timeout(LIMIT_S):
                yield it, sites
        except BaseException:
            for app in apps.values():
                app.shutdown.request("the test has failed")
            raise
        finally:
            await sites.join()


def test_a_round_whose_sum_was_opened_in_vain_is_made_again(tmp_path: Path) -> None:
    """Updates are suddenly so large that their sum wraps: the same clients give another one, trained anew."""

    async def scenario() -> None:
        apps = {name: Ward(SAMPLES[name], is_steep=True) for name in STAYING}
        async with federation(tmp_path, apps, count=2) as (it, sites):
            records = await it.ended(3)
        assert [(one["round"], one["attempt"], one["committed"]) for one in records] == [
            (1, 1, True),
            (2, 1, False),
            (2, 2, True),
        ]
        assert "near the limit" in records[1]["reason"], "it was opened"
        assert [one["reported"] for one in records] == [4, 4, 4]
        assert {end.status for end in sites.ends.values()} == {"finished"}
        for app in apps.values():
            assert len(set(app.seeds)) == 3, "each update is another"

    asyncio.run(scenario())


async def sum_of(it: House, record: Json) -> float:
    """What a committed round tells of its clients, whose model began at zero: the sum of weights times updates."""
    model = await it.model(record["model_sha256"])
    return float(model["weight"].double().mean()) * int(record["sample_count"])


@pytest.mark.parametrize("is_defended", [True, *at_night(False)], ids=["defended", "not defended"])
def test_the_same_model_with_one_client_less_tells_nothing_of_that_one(
    tmp_path: Path, is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """East has left, and the operator goes back to the first model: the next round is of all but east."""
    if not is_defended:
        monkeypatch.setattr("umbel.client.policy.earlier_sums.check_same_model", lambda *_, **__: None)

    async def scenario() -> None:
        apps = {**{name: Ward(SAMPLES[name]) for name in STAYING}, "east": Leaving(SAMPLES["east"])}
        async with federation(tmp_path, apps, count=3) as (it, _):
            (first,) = await it.ended(1)
            assert (first["committed"], first["reported"]) == (True, 5)
            await obeyed(it, "rollback", to=0)
            second = (await it.ended(2))[-1]
            again = (await it.ended(3))[-1] if second["rolled_back_to"] == 0 else second
            await obeyed(it, "stop", now=True)
            if is_defended:
                assert not again["committed"]
                assert again["reported"] == 0, "nothing was sent, so there is no second sum"
                declined = [one["client"] for one in again["clients"] if "over the same model" in one["reason"]]
                assert len(declined) >= 2, "so many that the others cannot go on"
            else:
                assert (again["committed"], again["reported"]) == (True, 4)
                difference, weight = await sum_of(it, first) - await sum_of(it, again), SAMPLES["east"]
                assert difference / weight == pytest.approx(weight / 1000, rel=0.05), "it is what east has added"

    asyncio.run(scenario())
