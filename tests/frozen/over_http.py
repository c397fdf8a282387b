"""Runs over HTTP of which every machine makes the same models, records and audit bundles, to the last bit.

A coordinator in this process, and devices that speak docs/reference/wire.md to it. Nothing is left to chance: keys are
fixed, the clock stands unless the play moves it, changes are Philox's, and requests come one after another. Between
attempts the run is paused until all devices wait, so that the same are asked each time.
"""

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from tests.aggregation.secagg.federation import seeded
from tests.federations.secure_device import SecureDevice
from tests.federations.server_device import Device, House, Json, LateClock, house, pass_time, update_for
from tests.frozen.kept import digest, of_every_machine
from tests.servers.waits import until, until_told
from tests.vectors.test_bits import exact
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.crypto.shamir import RandomBytes as Random
from umbel.aggregation.secagg.numbers.contribution import LocalWork

AT = 1_800_000_000.0  # the Unix second in which all of it happens
REPORT_EVERY_S = 2.0
_PATIENCE_S = 2.0  # beyond a window's end
Task = tuple[str, int, int]
"""The kind of a round, its number, and the attempt."""

RUN = """
name = "{run}"
seed = 7
[aggregation]
max_abs = 8.0
sample_count_max = 1000
server_learning_rate = 0.5
"""
SECURE = '[secure_aggregation]\nexpected_sample_count = 10\nminimum_work = 0.5\nmetrics = ["loss"]\n'


@dataclass(frozen=True, slots=True)
class Stage:
    """One run over HTTP. `sections`: its run file's, beside `RUN`. `roles`: by attempt, by place in the cohort, what
    becomes of a device: "partial" did half of its steps, "late" is never heard of, "declines" says that it will not.
    `back_in`: the attempt in which the operator rolls back to version 0, after its first report.
    """

    sections: str
    roles: Mapping[Task, Mapping[int, str]] = field(default_factory=dict[Task, Mapping[int, str]])
    n_devices: int = 5
    back_in: Task | None = None
    is_compressed: bool = False
    is_private: bool = False

    @property
    def is_masked(self) -> bool:
        return SECURE in self.sections


def rounds(count: int, target: int, minimum: int = 2, more: str = "over_selection = 1.0") -> str:
    return f"[rounds]\ncount = {count}\ntarget = {target}\nminimum = {minimum}\nwindow_s = 60.0\n{more}\n"


STAGES: Mapping[str, Stage] = {
    "float32": Stage(rounds(2, 3), {("training", 1, 1): {1: "partial"}, ("training", 2, 1): {0: "declines"}}),
    "integer, with changes down": Stage(
        rounds(3, 3) + '[codec]\nname = "integer"\n[downlink]\nname = "change"\n', is_compressed=True
    ),
    "eden": Stage(rounds(2, 3) + '[codec]\nname = "eden"\n'),
    "topk": Stage(rounds(2, 3) + '[codec]\nname = "topk"\nshare = 0.2\n'),
    "low rank": Stage(rounds(2, 3) + '[codec]\nname = "lowrank"\nrank = 2\n'),
    "an attempt that is abandoned": Stage(
        rounds(2, 4, 3), {("training", 1, 1): {0: "late", 1: "late"}, ("training", 2, 1): {3: "late"}}
    ),
    "masked": Stage(rounds(2, 4, 3) + '[codec]\nname = "integer"\nstep = 0.25\nfirst_norm = 0.5\n' + SECURE),
    "masked and private": Stage(
        rounds(2, 4, 3)
        + '[codec]\nname = "integer"\n'
        + SECURE
        + "[privacy]\nnoise_multiplier = 1.0\nclip_norm = 1.0\ncolluders = 0\n",
        is_private=True,
    ),
    "a canary": Stage(rounds(1, 3) + "[canary]\nclients = 2\nshare = 0.5\n"),
    "evaluations": Stage(
        rounds(4, 2)
        + "[evaluation]\nevery = 1\nclients = 3\n"
        + '[stop]\nmetric = "evaluation.loss"\nmode = "min"\npatience = 2\nminimum = 3\n'
    ),
    "a rollback in mid-run": Stage(rounds(3, 3), back_in=("training", 3, 1)),
    "a self-tuned window": Stage(rounds(6, 8, 3, "over_selection = 1.5\nself_tuning = true"), n_devices=12),
    "weights in proportion": Stage(rounds(2, 4, 1, 'weighting = "proportional"'), n_devices=7),
}


class StandingClock(LateClock):
    """Stands at `AT`, unless a play moves it."""

    def __init__(self) -> None:
        super().__init__()
        self._made_at = AT


class SteadyDevice(Device):
    """A device whose report is signed with the same nonce each time."""

    def headers(self, method: str, url: str, body: bytes, created: int | None = None, nonce: str = "") -> Json:
        if url.endswith(("/report", "/evaluation")):
            nonce = hashlib.sha256(f"{self.name} {url}".encode()).hexdigest()[:32]
        return super().headers(method, url, body, created, nonce)


def key_of(run: str, number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"{run} {number}".encode()).digest())


def start_of(stage: Stage) -> dict[str, Tensor]:
    """The model that a run begins with: two matrices, a row, and in plain runs values of other kinds."""
    values = exact(200, 9)
    state = {"first": values[:96].reshape(12, 8), "last": values[96:160].reshape(8, 8), "row": values[160:200]}
    if not stage.is_private:
        state["narrow"] = exact(24, 10).to(torch.bfloat16)
        state["count"] = torch.tensor(3)
    return {name: value.clone() for name, value in state.items()}


def change_of(model_sha256: str, rank: int, n_values: int) -> Tensor:
    """What a device has made of the model that it was given."""
    return exact(n_values, int(model_sha256[:12], 16) + rank)


class SeededClient(SecureClient):
    """One side of a secure attempt whose keys can be had again: they hang on the attempt and the place in it."""

    def __init__(self, context: Context, index: int, identity: Ed25519PrivateKey, _random: Random, **more: Any) -> None:
        super().__init__(context, index, identity, seeded(f"{context.attempt_id} {index}"), **more)


async def unmask(parties: Sequence[SecureDevice]) -> None:
    """All of them sign who is in the sum, and reveal what opens it."""
    for party in parties:
        await party.agree()
    await asyncio.gather(*(party.reveal() for party in parties))


def samples_of(number: int) -> int:
    return 5 + 3 * (number * 5 % 7)


@asynccontextmanager
async def steady_house(folder: Path, clock: LateClock) -> AsyncGenerator[House]:
    """A coordinator with a known audit key."""
    _put_audit_key(folder)
    async with house(folder, clock) as it:
        yield it


def _put_audit_key(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    key = folder / "audit.key"
    if not key.exists():
        key.write_text(base64.b64encode(bytes(range(32))).decode() + "\n")
        key.chmod(0o600)


@dataclass
class Played:
    """A run while it is played. `updates`: those that are not made here, by assignment; those made here are added."""

    it: House
    clock: LateClock
    stage: Stage
    devices: list[Device]
    layout: Layout
    updates: dict[str, str] = field(default_factory=dict[str, str])
    is_frozen: bool = False
    run: str = "demo"

    @property
    def driver(self) -> Any:
        return self.it.state.coordinator.drivers[self.run]

    async def all(self) -> None:
        """Attempt after attempt, until the run is over. It is paused when this begins, and between attempts."""
        while (await self.progress())["run"]["status"] == "paused":
            n_ended = len((await self.progress())["ended"])
            task, assignments = await self.opens()
            await (self.masked(assignments) if self.stage.is_masked else self.plain(task, assignments))
            await self.has_ended(n_ended + 1)
            await self.moves(1.0)

    async def progress(self) -> Json:
        answer = await self.it.http.get(f"/v1/admin/runs/{self.run}/progress", headers=self.it.admin)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def has_ended(self, count: int) -> None:
        """So many attempts have ended."""

        async def are_told() -> bool:
            return len((await self.progress())["ended"]) >= count

        await until_told(f"{count} ended attempts of {self.run}", are_told)

    async def opens(self) -> tuple[Task, list[tuple[Device, Json]]]:
        """All devices wait, then the run goes on; who is asked, and for what."""
        waiting = [asyncio.create_task(one.check_in(self.layout, wait_s=20.0)) for one in self.devices]
        try:
            await until_told("all devices waiting", self._all_wait)
            await self.order("resume", reason="all are there")
            await until("a round that is open", lambda: self.driver.state.phase == "training")
        finally:
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        plan = self.driver.plan
        asked = [one for one in self.devices if one.name in self.driver.state.cohort]
        assignments = [(one, await one.work(self.layout)) for one in asked]
        await self.order("pause", reason="until all are there")
        return (plan.task.value, plan.number, plan.attempt), assignments

    async def _all_wait(self) -> bool:
        return bool(await self.driver.waiting.count() >= len(self.devices))

    async def order(self, verb: str, **body: object) -> None:
        answer = await self.it.http.post(f"/v1/admin/runs/{self.run}/{verb}", json=body, headers=self.it.admin)
        assert answer.status_code == 200, answer.text

    async def moves(self, seconds: float) -> None:
        """Time goes by."""
        await pass_time(self.it, self.clock, seconds)

    async def plain(self, task: Task, assignments: Sequence[tuple[Device, Json]]) -> None:
        """A round in which each device speaks for itself."""
        roles, is_late = self.stage.roles.get(task, {}), False
        for rank, (device, assignment) in enumerate(assignments):
            role = roles.get(rank, "")
            await self.moves(REPORT_EVERY_S)
            if role == "late":
                is_late = True
            elif role == "declines":
                url = f"/v1/assignments/{assignment['id']}/decline"
                answer = await device.send("PUT", url, b'{"reason": "the machine is needed"}')
                assert answer.status_code == 204, answer.text
            elif task[0] == "evaluation":
                await self.measure(device, assignment)
            elif not await self.train(device, assignment, task, is_partial=role == "partial"):
                return
            if task == self.stage.back_in:
                await self.order("rollback", to=0)
                return
        if is_late:
            window_s = assignments[0][1]["window_s"]
            await self.moves(window_s + _PATIENCE_S)

    async def train(self, device: Device, assignment: Json, task: Task, *, is_partial: bool) -> bool:
        """A device's whole work; whether the round goes on after it."""
        model = await device.send("GET", f"/v1/models/{assignment['model']['sha256']}")
        assert hashlib.sha256(model.content).hexdigest() == assignment["model"]["sha256"]
        update = self.update_of(assignment)
        uploaded = await device.upload(assignment["id"], update)
        if uploaded.status_code == 409:
            return False
        assert uploaded.status_code == 201, uploaded.text
        told: Json = {
            "steps_done": 2 if is_partial else 4,
            "train_s": 1.5,
            "metrics": {"loss": device.sample_count / 8},
            "upload_bytes_per_s": 65536.0,
        }
        if task[0] == "canary":
            told["probe"] = {"steps_full": 8, "step_s": 0.125, "first_loss": 2.0, "last_loss": 1.0}
        answer = await device.report(assignment["id"], update, **told)
        assert answer.status_code == 200, answer.text
        return bool(answer.json()["outcome"] == "accepted")

    def update_of(self, assignment: Json) -> bytes:
        """What is sent: made here, or, of low rank, as it was made once, for a solver decides its last bits."""
        if assignment["id"] in self.updates:
            return base64.b64decode(self.updates[assignment["id"]])
        assert not (self.is_frozen and "lowrank" in self.stage.sections), f"nothing is kept of {assignment['id']}"
        update = update_for(
            assignment, self.layout, change_of(assignment["model"]["sha256"], assignment["rank"], self.layout.n_values)
        )
        self.updates[assignment["id"]] = base64.b64encode(update).decode()
        return update

    async def measure(self, device: Device, assignment: Json) -> None:
        loss = int(assignment["model"]["sha256"][:2], 16) / 64 + assignment["rank"] / 8
        body = json.dumps({"sample_count": device.sample_count, "evaluation": {"loss": loss}}).encode()
        answer = await device.send("PUT", f"/v1/assignments/{assignment['id']}/evaluation", body)
        assert answer.status_code == 200, answer.text

    async def masked(self, assignments: Sequence[tuple[Device, Json]]) -> None:
        """A round of which the coordinator learns a sum."""
        parties = [self.party(*one) for one in assignments]
        for party in parties:
            await party.advertise()
        for party in parties:
            await party.share()
        for party in parties:
            await self.send_masked(party)
        await unmask(parties)

    def party(self, device: Device, assignment: Json) -> SecureDevice:
        """A device in a secure attempt. What it draws by chance, it would draw again."""
        work = LocalWork(device.sample_count, 3, 4, {"loss": device.sample_count / 8})
        made = SecureDevice(device, self.layout, work, kind=SeededClient)
        made.accept(assignment)
        return made

    async def send_masked(self, party: SecureDevice) -> None:
        await self.moves(REPORT_EVERY_S)
        await party.hear()
        answer = await party.send_input(self.masked_of(party))
        assert answer.json()["outcome"] == "accepted", answer.text

    def masked_of(self, party: SecureDevice) -> bytes:
        """Its masked update, the same each time."""
        return party.masked(change_of(party.offer.model.sha256, party.offer.rank, self.layout.n_values) / 8)

    async def facts(self) -> tuple[Json, Json]:
        """What is frozen of the run: hashes; and what they are of, for people."""
        records = [of_every_machine(one, has_bytes=False) for one in (await self.progress())["ended"]]
        answer = await self.it.http.get(f"/v1/admin/runs/{self.run}/versions", headers=self.it.admin)
        versions = list(answer.json())
        bundles = [self._bundle(one) for one in await self._bundles()]
        run = (await self.progress())["run"]
        hashes = {
            "versions": [one["sha256"] for one in sorted(versions, key=lambda one: one["version"])],
            "told_of_versions": digest(versions),
            "records": list(map(digest, records)),
            "bundles": list(map(digest, bundles)),
            "ends": f"{run['status']}: {run['reason']}",
        }
        return hashes, {"records": records, "bundles": bundles, "versions": versions}

    async def _bundles(self) -> list[Json]:
        answer = await self.it.http.get(f"/v1/admin/runs/{self.run}/audit", headers=self.it.admin)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["bundles"])

    def _bundle(self, sealed: Json) -> Json:
        """A bundle without what this machine and its libraries are, and without what hangs on that."""
        bundle = dict(sealed["bundle"])
        del bundle["maker"], bundle["previous"]
        facts = bundle["facts"]
        for one in facts.get("clients", ()):
            del one["bytes_up"], one["bytes_down"]  # as in a record
            if one["report"] and (self.stage.is_compressed or self.stage.is_masked):
                del one["report"]["signature"]  # of the update's hash
                del one["report"]["body"]
        return bundle


async def played(
    stage: Stage, folder: Path, updates: Mapping[str, str] | None = None
) -> tuple[Json, Json, dict[str, str]]:
    """What is frozen of a stage, what that is of, and the updates that were sent. `updates`: those that are kept."""
    clock = StandingClock()
    async with steady_house(folder, clock) as it:
        run = await begun(it, clock, stage)
        run.updates, run.is_frozen = dict(updates or {}), updates is not None
        await run.all()
        hashes, whole = await run.facts()
        return hashes, whole, run.updates


async def begun(it: House, clock: LateClock, stage: Stage, run: str = "demo") -> Played:
    """The run is made, and paused; its devices are enrolled."""
    answer = await it.put_run(RUN.format(run=run) + stage.sections, await it.put_model(start_of(stage)), run)
    assert answer.status_code == 201, answer.text
    made = again(it, clock, stage, run)
    for device, token in zip(made.devices, await it.tokens(stage.n_devices), strict=True):
        enrolled = await device.enrol(token)
        assert enrolled.status_code == 200, enrolled.text
    await made.order("pause", reason="until all are there")
    return made


def again(it: House, clock: LateClock, stage: Stage, run: str = "demo") -> Played:
    """A run that is there, and its devices, who have their keys still."""
    devices: list[Device] = [
        SteadyDevice(
            it.http,
            f"{'d' if run == 'demo' else run}{number:02d}",
            run=run,
            key=key_of(run, number),
            sample_count=samples_of(number),
            clock=clock,
        )
        for number in range(stage.n_devices)
    ]
    return Played(it, clock, stage, devices, Layout.of_state(start_of(stage)), run=run)
