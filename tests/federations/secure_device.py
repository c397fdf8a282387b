"""A device that takes part in secure rounds, step by step, so that a test can leave one out or do it otherwise."""

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch
from pydantic import TypeAdapter
from torch import Tensor

from tests.federations.own_dithers import secret_of
from tests.federations.server_device import Device, Json
from tests.servers.waits import until_told
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.assignment import Assignment
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.context import context_of
from umbel.aggregation.secagg.masked_input import masked_input
from umbel.aggregation.secagg.numbers.composition import composition_of
from umbel.aggregation.secagg.numbers.contribution import Contribution, LocalWork, contribution

_ASSIGNMENT: TypeAdapter[Assignment] = TypeAdapter(Assignment)


class LeftOut(Exception):
    """The round goes on without this device, or is over."""


@dataclass
class SecureDevice:
    """`device` in one attempt. `work`: what it did, which nobody else may learn. `kind`: how it keeps the rules."""

    device: Device
    layout: Layout
    work: LocalWork = field(default_factory=lambda: LocalWork(10, 4, 4, {"loss": 0.5, "accuracy": 0.75}))
    assignment: Assignment | None = None
    client: SecureClient | None = None
    kind: type[SecureClient] = SecureClient

    @property
    def offer(self) -> Assignment:
        assert self.assignment is not None
        return self.assignment

    @property
    def party(self) -> SecureClient:
        assert self.client is not None
        return self.client

    async def begin(self, **changed: Any) -> Json:
        """Check in, and make keys."""
        raw = await self.device.work(self.layout)
        self.accept(raw, **changed)
        return raw

    def accept(self, raw: Json, **changed: Any) -> None:
        """Take up an assignment, and make keys."""
        self.assignment = _ASSIGNMENT.validate_python(raw)
        context = context_of(self.assignment)
        names = list(context.names)
        self.client = self.kind(context, names.index(self.device.name), self.device.key, os.urandom, **changed)  # type: ignore[arg-type]

    async def put(self, phase: str, body: bytes, query: str = "") -> httpx.Response:
        url = f"/v1/assignments/{self.offer.id}/secure/{phase}{query}"
        return await self.device.send("PUT", url, body, {"Content-Type": "application/octet-stream"})

    async def get(self, phase: str, wait_s: float = 10.0) -> bytes:
        """What this device needs for its turn. Raises `LeftOut`."""

        async def told() -> httpx.Response | None:
            url = f"/v1/assignments/{self.offer.id}/secure/{phase}?wait_s={wait_s:g}"
            answer = await self.device.send("GET", url)
            if answer.status_code == 409:
                raise LeftOut(answer.json()["detail"])
            assert answer.status_code in (200, 204), answer.text
            return answer if answer.status_code == 200 else None

        return (await until_told(f"what {self.device.name} needs for {phase}", told)).content

    async def advertise(self) -> None:
        answer = await self.put("advertise-keys", self.party.advertise())
        assert answer.status_code == 204, answer.text

    async def share(self) -> None:
        answer = await self.put("share-keys", self.party.share(await self.get("share-keys")))
        assert answer.status_code == 204, answer.text

    async def hear(self) -> None:
        self.party.hear(await self.get("masked-input"))

    def masked(self, change: Tensor) -> bytes:
        """The masked update."""
        return b"".join(bytes(piece) for piece in masked_input(self.contribution(change), self.party))

    def contribution(self, change: Tensor, work: LocalWork | None = None) -> Contribution:
        """What it masks. `work`: other than its own."""
        composition = composition_of(self.offer, self.layout)
        return contribution(composition, lambda: iter([change]), work or self.work, secret_of(self.device.name))

    async def send_input(self, update: bytes, **changed: object) -> httpx.Response:
        uploaded = await self.device.upload(self.offer.id, update)
        assert uploaded.status_code == 201, uploaded.text
        return await self.report(update, **changed)

    async def report(self, update: bytes, **changed: object) -> httpx.Response:
        """The report of a masked update. `changed`: fields of it."""
        sha = hashlib.sha256(update)
        report = {
            "update_sha256": sha.hexdigest(),
            "signature": base64.b64encode(self.party.sign_input(sha.digest())).decode(),
            **changed,
        }
        return await self.device.send("PUT", f"/v1/assignments/{self.offer.id}/report", json.dumps(report).encode())

    async def agree(self) -> None:
        answer = await self.put("consistency-check", self.party.agree(await self.get("consistency-check")))
        assert answer.status_code == 204, answer.text

    async def decline(self, reason: str) -> httpx.Response:
        return await self.device.send(
            "PUT", f"/v1/assignments/{self.offer.id}/decline", json.dumps({"reason": reason}).encode()
        )

    async def reveal(self) -> None:
        """Reveal shares until they are needed no more."""
        answer = self.party.reveal(await self.get("unmasking"))
        while (sent := await self.put("unmasking", answer, "?wait_s=10")).status_code == 202:
            pass
        assert sent.status_code == 204, sent.text

    async def take_part(self, change: Tensor) -> Mapping[str, Any]:
        """A whole round; the answer to the report."""
        await self.begin()
        await self.advertise()
        await self.share()
        await self.hear()
        answer = await self.send_input(self.masked(change))
        assert answer.status_code == 200, answer.text
        told = dict(answer.json())
        if told["outcome"] == "accepted":
            await self.agree()
            await self.reveal()
        return told


def change_of(layout: Layout, seed: int, scale: float = 0.01) -> Tensor:
    return scale * torch.randn(layout.n_values, generator=torch.Generator().manual_seed(seed))
