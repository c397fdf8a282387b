"""A small federation of raw devices over real HTTP, which ask again until they are answered, and wherever they are.

Its run has two rounds, and the first attempt at the first is abandoned. Two of its four clients report; the others
train for ever, until they are released. So every committed round is made of the same two reports, and the last model's
hash tells whether each of them counted, once.
"""

import asyncio
import hashlib
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, TypeVar

import httpx
import torch

from tests.federations.server_device import Device, House, Json, repr_digest, run_file, small_state, update_for
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.state import with_first_control
from umbel.server.settings import Settings

T = TypeVar("T")
N_DEVICES = 4
N_ROUNDS = 2
_PAUSE_S = 0.03
RUN = (
    run_file(count=N_ROUNDS, target=2, minimum=2, over_selection=2.0, window_s=300.0)  # a tenth: waits for all four
    + '[codec]\nname = "integer"\n[downlink]\nname = "change"\n'
)


class Urls(httpx.AsyncBaseTransport):
    """Sends each request to one of several coordinators, drawn by chance; reports to each of them in turn."""

    def __init__(self, urls: Sequence[str], seed: int) -> None:
        self._urls = [httpx.URL(url) for url in urls]
        self._draw = random.Random(seed)
        self._for_reports = itertools.cycle(self._urls)
        self._http = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        is_report = request.url.path.endswith("/report")
        chosen = next(self._for_reports) if is_report else self._draw.choice(self._urls)
        request.url = request.url.copy_with(host=chosen.host, port=chosen.port)
        return await self._http.handle_async_request(request)

    async def aclose(self) -> None:
        await self._http.aclose()


async def answered(ask: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
    """The first answer of a coordinator that is well: devices ask for as long as it takes."""
    while True:
        try:
            response = await ask()
            if response.status_code < 500:
                return response
        except httpx.TransportError:
            pass
        await asyncio.sleep(_PAUSE_S)


@dataclass
class Accepted:
    """A report that was answered: `at`, on the monotonic clock."""

    assignment: str
    at: float


@dataclass
class Federation:
    """The operator and the devices of one run. `accepted`: what they were told."""

    run_file: ClassVar[str] = RUN
    ends_as: ClassVar[str] = "finished"
    n_attempts: ClassVar[int] = N_ROUNDS + 1

    http: httpx.AsyncClient
    admin_settings: Settings
    state: dict[str, torch.Tensor] = field(default_factory=small_state)
    seed: int = 0
    accepted: list[Accepted] = field(default_factory=list)

    async def begin(self) -> list[Device]:
        """Make the run and enrol the devices, each step repeated until it is done."""
        while not self.admin_settings.admin_key_path.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(_PAUSE_S)
        await _until(self._make_run)
        devices = [Device(self.http, f"d{i}") for i in range(N_DEVICES)]
        for device in devices:
            [token] = await _until(partial(self.house.tokens, client=device.name))  # a run's coverage may name it
            enrolled = await answered(partial(device.enrol, token))
            assert enrolled.status_code == 200, enrolled.text
        return devices

    @property
    def layout(self) -> Layout:
        """Of the run's model."""
        layout = Layout.of_state(self.state)
        return layout.with_control if '"scaffold"' in self.run_file else layout

    async def _make_run(self) -> None:
        state = with_first_control(self.state, self.layout)
        made = await self.house.put_run(self.run_file, await self.house.put_model(state, self.layout))
        assert made.status_code in (200, 201), made.text

    async def run(self) -> list[Json]:
        """From the first request to the run's end: the records of its attempts."""
        devices = await self.begin()
        layout = self.layout
        await self.look_in(devices[-1], layout)
        await asyncio.gather(self.operate(), *(self.live(i, device, layout) for i, device in enumerate(devices)))
        return await _until(lambda: self.house.ended(self.n_attempts))

    async def look_in(self, device: Device, layout: Layout) -> None:
        """Wait for work, and hang up: nobody else asks while the coordinator stores that the device has left."""
        is_in = False
        while not is_in:
            looking = asyncio.create_task(device.check_in(layout, wait_s=5.0))
            while not (is_in or looking.done()):  # it is done when the coordinator has died
                is_in = await _until(self._n_waiting) > 0
            looking.cancel()
            await asyncio.wait([looking])
        while await _until(self._n_waiting) > 0:  # at most until a stored check-in expires, if the coordinator has died
            pass

    async def _n_waiting(self) -> int:
        await asyncio.sleep(_PAUSE_S)
        return int((await self.house.progress())["live"]["waiting"])

    @property
    def house(self) -> House:
        """What the operator asks the coordinator by."""
        return House(self.http, self.admin_settings, None)

    async def operate(self) -> None:
        """What the operator does while the run goes on: nothing."""

    async def live(self, i: int, device: Device, layout: Layout) -> None:
        """Take part until the run is over."""
        while True:
            answer = (await answered(lambda: device.check_in(layout, wait_s=5.0))).json()
            if answer["run_status"] not in ("running", "paused"):
                assert answer["run_status"] == self.ends_as, answer
                return
            if assignment := answer["assignment"]:
                await self.work(i, device, layout, assignment)

    async def work(self, i: int, device: Device, layout: Layout, assignment: Json) -> None:
        name = assignment["id"]
        if (assignment["round"], assignment["attempt"]) == (1, 1) and i > 0:
            url, body = f"/v1/assignments/{name}/decline", b'{"reason": "the first attempt is to fail"}'
            declined = await answered(lambda: device.send("PUT", url, body))
            assert declined.status_code == 204, declined.text
        elif i < 2:
            await self.train(device, layout, assignment)
        else:
            await self.outlast(device, name)

    async def outlast(self, device: Device, name: str) -> None:
        """Be at work until the round needs it no more."""
        while True:
            status = await answered(lambda: device.send("GET", f"/v1/assignments/{name}?wait_s=5"))
            assert status.status_code == 200, status.text
            if status.json()["state"] != "open":
                return

    async def train(self, device: Device, layout: Layout, assignment: Json, **changed: object) -> None:
        """Upload an update that follows from the model, in two chunks, and report it."""
        digest = assignment["model"]["sha256"]
        model = await answered(lambda: device.send("GET", f"/v1/models/{digest}"))
        assert hashlib.sha256(model.content).hexdigest() == digest
        draw = torch.Generator().manual_seed(int(digest[:12], 16) + int(device.name[1:]))
        values = torch.randn(layout.n_values, generator=draw) / 10
        update = update_for(assignment, layout, values)
        if await self.upload(device, assignment["id"], update):
            self.note(assignment, await answered(lambda: device.report(assignment["id"], update, **changed)))

    def note(self, assignment: Json, answer: httpx.Response) -> None:
        """What a report was told."""
        assert answer.status_code == 200, answer.text
        if answer.json()["outcome"] == "accepted":
            self.accepted.append(Accepted(assignment["id"], time.monotonic()))

    def check(self, records: list[Json]) -> str:
        """Raise `AssertionError` unless the run went as it must; the last model's hash."""
        return check(records, self.accepted)

    async def upload(self, device: Device, name: str, update: bytes) -> bool:
        """Send what the coordinator does not have; False if it wants no more of it."""
        half = len(update) // 2
        while True:
            stands = await answered(lambda: device.send("HEAD", f"/v1/assignments/{name}/update"))
            if stands.headers.get("upload-complete") == "?1":
                return True
            offset = int(stands.headers.get("upload-offset", "0"))
            sent = await answered(lambda: _next_chunk(device, name, update, offset, half))  # noqa: B023 - awaited at once
            if sent.status_code == 409 and sent.json()["type"].endswith("assignment-closed"):
                return False


class Remembering(Federation):
    """Its server's optimizer remembers the rounds before, and control variates travel with its model."""

    run_file: ClassVar[str] = (
        RUN.replace("[aggregation]", '[aggregation]\noptimizer = "adam"')
        + '[training]\nalgorithm = "scaffold"\ntotal_samples = 40\n'
    )


async def _next_chunk(device: Device, name: str, update: bytes, offset: int, half: int) -> httpx.Response:
    if offset == 0:
        fields = {"Upload-Length": str(len(update)), "Upload-Complete": "?0", "Repr-Digest": repr_digest(update)}
        return await device.send("POST", f"/v1/assignments/{name}/update", update[:half], fields)
    return await device.patch(name, update[offset:], offset, is_last=True)


async def _until(act: Callable[[], Awaitable[T]]) -> T:
    """Repeat what an operator does until it has worked."""
    while True:
        try:
            return await act()
        except (httpx.TransportError, AssertionError):
            await asyncio.sleep(_PAUSE_S)


def check(records: list[Json], accepted: list[Accepted]) -> str:
    """Every accepted report is in its round's record, once, and no other; the last model's hash."""
    assert [(one["round"], one["attempt"], one["committed"]) for one in records] == [
        (1, 1, False),
        (1, 2, True),
        (2, 1, True),
    ]
    for record in records[1:]:
        counted = [one["client"] for one in record["clients"] if one["fate"] == "accepted"]
        assert counted == ["d0", "d1"], record
        assert record["sample_count"] == 20
        told = {one.assignment for one in accepted if f"demo.{record['round']}.{record['attempt']}." in one.assignment}
        assert told == {f"demo.{record['round']}.{record['attempt']}.{client}" for client in counted}
    return str(records[-1]["model_sha256"])
