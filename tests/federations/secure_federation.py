"""The federation of `federation.py` in secure rounds: four devices, each of which counts in every round.

Every message is sent until it is answered, wherever it goes. Nobody is left out, so each round's model follows from the
one before, and the last model's hash tells whether all of them counted, once.
"""

import base64
import hashlib
import itertools
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
import torch

from tests.federations.false_dealers import WrongDealer
from tests.federations.federation import Accepted, Federation, Urls, answered
from tests.federations.secure_device import LeftOut, SecureDevice
from tests.federations.server_device import Device, Json, run_file
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.numbers.contribution import LocalWork

N_ROUNDS = 2
SECURE = '[codec]\nname = "integer"\nstep = 0.25\nfirst_norm = 0.55\n[secure_aggregation]\nexpected_sample_count = 10\n'


def secure_run(count: int = N_ROUNDS, window_s: float = 300.0) -> str:
    return run_file(count=count, target=4, minimum=3, window_s=window_s) + SECURE


class InTurn(Urls):
    """Messages of secure rounds go to each coordinator in turn, too: never all of a phase to one."""

    def __init__(self, urls: list[str], seed: int) -> None:
        super().__init__(urls, seed)
        self._for_messages = itertools.cycle(self._urls)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "PUT" and "/secure/" in request.url.path:
            chosen = next(self._for_messages)
            request.url = request.url.copy_with(host=chosen.host, port=chosen.port)
            return await self._http.handle_async_request(request)
        return await super().handle_async_request(request)


class SteadyDevice(Device):
    """Asks again until a coordinator that is well answers."""

    async def send(
        self, method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        return await answered(lambda: super(SteadyDevice, self).send(method, url, body, headers))


@dataclass
class SecureFederation(Federation):
    run_file = secure_run()
    n_attempts = N_ROUNDS

    state: dict[str, torch.Tensor] = field(default_factory=lambda: {"w": torch.zeros(3000)})

    def kind(self, i: int, assignment: Json) -> type[SecureClient]:
        """How a device keeps the protocol's rules: all of them."""
        return SecureClient

    async def work(self, i: int, device: Device, layout: Layout, assignment: Json) -> None:
        steady = SteadyDevice(device.http, device.name, key=device.key)
        work = LocalWork(10 * (i + 1), 4, 4, {"loss": float(i)})
        party = SecureDevice(steady, layout, work, kind=self.kind(i, assignment))
        party.accept(assignment)
        await party.advertise()
        await party.share()
        await party.hear()
        draw = torch.Generator().manual_seed(int(assignment["model"]["sha256"][:12], 16) + i)
        update = party.masked(0.01 * torch.randn(layout.n_values, generator=draw))
        assert await self.upload(steady, assignment["id"], update)
        sha = hashlib.sha256(update)
        report = {
            "update_sha256": sha.hexdigest(),
            "signature": base64.b64encode(party.party.sign_input(sha.digest())).decode(),
        }
        url = f"/v1/assignments/{assignment['id']}/report"
        self.note(assignment, await steady.send("PUT", url, json.dumps(report).encode()))
        await party.agree()
        await party.reveal()

    def check(self, records: list[Json]) -> str:
        return check_secure(records, self.accepted)


@dataclass
class CheatedFederation(SecureFederation):
    """In the first attempt d3 deals false shares: it is named, and the next goes as every other round."""

    n_attempts = N_ROUNDS + 1

    def kind(self, i: int, assignment: Json) -> type[SecureClient]:
        return WrongDealer if i == 3 and _is_first(assignment) else SecureClient

    async def work(self, i: int, device: Device, layout: Layout, assignment: Json) -> None:
        with suppress(LeftOut):  # the others' shares were enough to see that d3 has cheated
            await super().work(i, device, layout, assignment)

    def check(self, records: list[Json]) -> str:
        first, *others = records
        assert (first["committed"], first["reason"].count("d3 has dealt wrong shares")) == (False, 1), first["reason"]
        named = [one["client"] for one in first["clients"] if "it has dealt wrong shares" in one["reason"]]
        assert named == ["d3"]
        assert [(one["round"], one["attempt"], one["committed"]) for one in others] == [(1, 2, True), (2, 1, True)]
        assert all(one["sample_count"] == 100 for one in others), "it is asked again: there are too few others"
        return str(others[-1]["model_sha256"])


def _is_first(assignment: Json) -> bool:
    return (assignment["round"], assignment["attempt"]) == (1, 1)


def check_secure(records: list[Json], accepted: list[Accepted]) -> str:
    """Every round has committed at once, with everybody in its sum; the last model's hash."""
    assert [(one["round"], one["attempt"], one["committed"], one["reason"]) for one in records] == [
        (number + 1, 1, True, records[number]["reason"]) for number in range(N_ROUNDS)
    ], [one["reason"] for one in records]
    for record in records:
        assert [one["client"] for one in record["clients"] if one["fate"] == "accepted"] == ["d0", "d1", "d2", "d3"]
        assert record["sample_count"] == 100
        assert record["metrics"] == {"loss": (0 * 10 + 1 * 20 + 2 * 30 + 3 * 40) / 100}
    assert len(accepted) == 4 * N_ROUNDS
    return str(records[-1]["model_sha256"])
