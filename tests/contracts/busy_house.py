"""A coordinator in the middle of things, spoken to synchronously: what a fuzzer's requests should hit."""

import asyncio
import secrets
from collections.abc import Generator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.federations.secure_device import SecureDevice
from tests.federations.server_device import Device, House, house, repr_digest, run_file, sha256, small_state, update_of
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.secagg.turns import Phase

_COHORT = 18
_MASKED = 4
_SECURE = '[codec]\nname = "integer"\n[secure_aggregation]\n'


@dataclass(frozen=True)
class Held:
    """An assignment and who holds it. `n_parts`: how many halves of its update have been uploaded."""

    device: Device
    assignment: str
    n_parts: int


class BusyHouse:
    """A run in whose open round uploads stand at every stage, one that has ended, one that nobody has joined yet;
    enrolled clients, one more that nobody needs, and unused tokens; `masked`: those of a run with a secure round, in
    which all have advertised keys, and one has shared them.
    """

    def __init__(
        self,
        loop: asyncio.Runner,
        it: House,
        layout: Layout,
        tokens: list[str],
        held: list[Held],
        masked: list[SecureDevice],
    ) -> None:
        self._loop = loop
        self.it = it
        self.layout = layout
        self._tokens, self._unused_tokens = tuple(tokens), tokens
        self.held = held
        self.masked = [Held(one.device, one.offer.id, 0) for one in masked]
        self._secure_messages = [one.party.advertise() for one in masked]
        self.update = an_update(layout)
        self.model = str(it.state.coordinator.drivers["demo"].run.model.sha256)

    def send(self, request: httpx.Request) -> httpx.Response:
        """The coordinator's answer; what else it has to do goes on meanwhile."""
        return self._loop.run(self.it.http.send(request))

    @property
    def is_spent(self) -> bool:
        """Whether so many assignments have been closed that requests would hit nothing."""
        driver = self.it.state.coordinator.drivers["demo"]
        return sum(driver.open_round(one.device.name) is not None for one in self.held) < len(self.held) // 2

    def values(self) -> dict[str, list[Any]]:
        """By the name of a parameter or a field, values that mean something here: always as many of them, as hypothesis
        must find the same choices when it replays a case.
        """
        half = len(self.update) // 2
        return {
            "assignment": [one.assignment for one in [*self.held, *2 * self.masked]],
            "sha256": [self.model],
            "model": [self.model],
            "client": ["spare"],
            "name": ["spare", "ended"],
            "run": ["demo", "ended", "spare"],
            "layout_digest": [self.layout.digest],
            "update_sha256": [sha256(self.update)],
            "token": list(self._tokens),
            "wait_s": [0.0],
            "phase": [phase.value for phase in Phase],
            "number": [0, 1],
            "Upload-Length": [str(len(self.update))],
            "Upload-Offset": ["0", str(half), str(len(self.update))],
            "Upload-Complete": ["?0", "?1"],
            "Repr-Digest": [repr_digest(self.update)],
            "Range": ["bytes=0-9", "bytes=9-", "bytes=-9"],
        }

    def unused_token(self) -> str:
        """One to enrol with, as long as there are any."""
        return self._unused_tokens.pop() if self._unused_tokens else self._tokens[0]

    def messages(self) -> dict[str, dict[str, Any]]:
        """By the last segment of an address, a message that is taken there (an enrolment: with a token and a key)."""
        client, reason = f"newcomer-{secrets.token_hex(4)}", {"reason": "none"}
        return {
            "enrolments": {"token": "", "client": client, "public_key": ""},
            "check-ins": {"run": "demo", "sample_count": 10, "layout_digest": self.layout.digest, "wait_s": 0.0},
            "report": {"sample_count": 10, "steps_done": 4, "steps_planned": 4, "update_sha256": sha256(self.update)},
            "evaluation": {"sample_count": 10, "evaluation": {"loss": 0.5}},
            "decline": reason,
            "stop": reason,
            "pause": reason,
            "rollback": {"to": 0, **reason},
            "tokens": {"count": 2, "ttl_s": 60.0},
        }

    def bodies(self) -> list[bytes]:
        """Bodies of uploads that mean something here."""
        half = len(self.update) // 2
        return [self.update, self.update[:half], self.update[half:], b"", *self._secure_messages]


def an_update(layout: Layout) -> bytes:
    return update_of(layout, torch.full((layout.n_values,), 0.25))


@contextmanager
def busy_house(data: Path) -> Generator[BusyHouse]:
    with asyncio.Runner() as loop:
        open_things = AsyncExitStack()
        try:
            yield loop.run(_prepared(loop, open_things, data))
        finally:
            loop.run(open_things.aclose())


async def _prepared(loop: asyncio.Runner, open_things: AsyncExitStack, data: Path) -> BusyHouse:
    it = await open_things.enter_async_context(house(data))
    last, *devices = await it.devices(1 + _COHORT + _MASKED)
    layout, model = Layout.of_state(small_state()), await it.put_model(small_state())
    tokens = await it.tokens(20)
    assert (await Device(it.http, "spare").enrol(tokens.pop())).status_code == 200
    await _end_a_run(it, last, layout, model)
    masked = [SecureDevice(devices.pop(), layout) for _ in range(_MASKED)]
    for name in ("demo", "spare"):
        text = run_file(count=5, target=_COHORT, window_s=3600.0).replace("demo", name)
        assert (await it.put_run(text, model, name)).status_code == 201
    work = await asyncio.gather(*(device.work(layout) for device in devices))
    held = [Held(device, one["id"], i % 3) for i, (device, one) in enumerate(zip(devices, work, strict=True))]
    for one in held:
        await _upload(one, an_update(layout))
    await _begin_a_secure_round(it, masked, model)
    return BusyHouse(loop, it, layout, tokens, held, masked)


async def _begin_a_secure_round(it: House, masked: list[SecureDevice], model: str) -> None:
    text = run_file(target=_MASKED, minimum=3, window_s=36_000.0).replace("demo", "masked") + _SECURE
    answer = await it.put_run(text, model, "masked")
    assert answer.status_code == 201, answer.text
    for one in masked:
        one.device.run, one.device.sample_count = "masked", 0
    await asyncio.gather(*(one.begin() for one in masked))
    await asyncio.gather(*(one.advertise() for one in masked))
    await masked[0].share()


async def _end_a_run(it: House, device: Device, layout: Layout, model: str) -> None:
    answer = await it.put_run(run_file(target=1).replace("demo", "ended"), model, "ended")
    assert answer.status_code == 201, answer.text
    device.run = "ended"
    assert (await device.take_part(layout, torch.zeros(layout.n_values)))["outcome"] == "accepted"


async def _upload(held: Held, update: bytes) -> None:
    if held.n_parts == 0:
        return
    is_whole = held.n_parts == 2
    fields = {
        "Upload-Length": str(len(update)),
        "Upload-Complete": "?1" if is_whole else "?0",
        "Repr-Digest": repr_digest(update),
    }
    body = update if is_whole else update[: len(update) // 2]
    answer = await held.device.send("POST", f"/v1/assignments/{held.assignment}/update", body, fields)
    assert answer.status_code == 201, answer.text
