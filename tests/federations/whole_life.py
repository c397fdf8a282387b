"""A federation whose run has all that can happen to one: two canaries, a pause, a rollback, evaluations, a stop.

d0 and d1 are named by the run file, so that they try out and train; d2 and d3 measure. The operator cuts the first
canary short, rolls back to version 0 during the first evaluation, and stops the run during the third round. So round 2
begins where round 1 did, and makes the same model, if each report counts once, in either, and if what the server's
optimizer remembers and the global control variates (SCAFFOLD) came back with the version.
"""

import asyncio
import json
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from tests.federations.federation import Federation, answered
from tests.federations.server_device import Device, Json
from umbel.aggregation.model.layout import Layout

_POLL_S = 0.03
_PROBE: Json = {"steps_full": 16, "step_s": 0.01}
_HELD_OUT = ((10, 1.0), (30, 2.0))  # samples and loss, of d2 and d3
RUN = """
name = "demo"
seed = 7
[rounds]
count = 3
target = 2
minimum = 2
over_selection = 1.0
window_s = 300.0
[coverage]
sites = ["d0", "d1"]
[aggregation]
optimizer = "adam"
max_abs = 8.0
sample_count_max = 1000
[training]
algorithm = "scaffold"
total_samples = 40
[canary]
clients = 2
[evaluation]
every = 1
clients = 2
"""
ATTEMPTS = (  # task, round, attempt, whether it was committed, whose reports counted
    ("canary", 1, 1, False, ()),
    ("canary", 1, 2, True, ("d0", "d1")),
    ("training", 1, 1, True, ("d0", "d1")),
    ("evaluation", 1, 1, False, ()),
    ("training", 2, 1, True, ("d0", "d1")),
    ("evaluation", 2, 1, True, ("d2", "d3")),
    ("training", 3, 1, False, ()),
)
_CUT_SHORT = {(task, number, attempt) for task, number, attempt, is_committed, _ in ATTEMPTS if not is_committed}
_MARKS = {"canary": "c", "evaluation": "e", "training": ""}


@dataclass
class WholeLife(Federation):
    """`is_rolled_back`: until the operator knows, nobody trains on: repeated after that, its order would mean more."""

    run_file: ClassVar[str] = RUN
    ends_as: ClassVar[str] = "stopped"
    n_attempts: ClassVar[int] = len(ATTEMPTS)
    is_rolled_back: asyncio.Event = field(default_factory=asyncio.Event)

    async def operate(self) -> None:
        """Wait for the attempts that are to be cut short to have a report, and cut them short."""
        await self._until_one_has_reported("canary", 1)
        await self._order("pause", now=True)
        await self._order("resume")
        await self._until_one_has_reported("evaluation", 1)
        await self._order("rollback", to=0)
        self.is_rolled_back.set()
        await self._until_one_has_reported("training", 3)
        await self._order("start")  # which changes nothing, for the round has begun
        await self._order("stop", reason="enough")

    async def _order(self, verb: str, **body: object) -> None:
        url, content = f"/v1/admin/runs/demo/{verb}", json.dumps(body)
        answer = await answered(lambda: self.http.post(url, content=content, headers=self.house.admin))
        assert answer.status_code == 200, answer.text

    async def _until_one_has_reported(self, task: str, number: int) -> None:
        url = "/v1/admin/runs/demo/progress"
        while True:
            live = (await answered(partial(self.http.get, url, headers=self.house.admin))).json()["live"]
            found = live["clients"] if live and (live["task"], live["round"]) == (task, number) else []
            if any(client["fate"] == "accepted" for client in found):
                return
            await asyncio.sleep(_POLL_S)

    async def work(self, i: int, device: Device, layout: Layout, assignment: Json) -> None:
        task, number = assignment["task"], assignment["round"]
        if i in (1, 3) and (task, number, assignment["attempt"]) in _CUT_SHORT:
            await self.outlast(device, assignment["id"])
        elif task == "evaluation":
            await self.measure(i, device, assignment)
        else:
            if number > 1:
                await self.is_rolled_back.wait()
            await self.train(device, layout, assignment, **({"probe": _PROBE} if task == "canary" else {}))

    async def measure(self, i: int, device: Device, assignment: Json) -> None:
        n_samples, loss = _HELD_OUT[i - 2]
        body = json.dumps({"sample_count": n_samples, "evaluation": {"loss": loss}}).encode()
        url = f"/v1/assignments/{assignment['id']}/evaluation"
        self.note(assignment, await answered(lambda: device.send("PUT", url, body)))

    def check(self, records: list[Json]) -> str:
        """Every attempt ended as it must, once, and what counted is what was told to count."""
        assert [(one["task"], one["round"], one["attempt"], one["committed"]) for one in records] == [
            attempt[:4] for attempt in ATTEMPTS
        ]
        told = {one.assignment for one in self.accepted}
        for record, (task, number, attempt, is_committed, clients) in zip(records, ATTEMPTS, strict=True):
            counted = tuple(one["client"] for one in record["clients"] if one["fate"] == "accepted")
            prefix = f"demo.{number}.{_MARKS[task]}{attempt}."
            assert counted == clients, record
            assert not is_committed or {one for one in told if one.startswith(prefix)} == {
                prefix + client for client in clients
            }
        _, _, first, back, second, measured, _ = records
        assert (back["rolled_back_to"], back["model_version"], second["model_version"]) == (0, 2, 3)
        assert measured["evaluation"] == {"loss": 1.75}
        assert first["model_sha256"] == second["model_sha256"], "made of the same model and the same reports"
        return str(second["model_sha256"])
