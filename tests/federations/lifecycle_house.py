"""What tests of a run's life cycle do: a device that trains or measures, orders of an operator, the versions."""

import json

import httpx
import torch
from torch import Tensor

from tests.federations.server_device import Device, House, Json, update_of
from umbel.aggregation.model.layout import Layout

RUN = """
name = "demo"
[rounds]
count = {count}
target = {target}
over_selection = 1.0
window_s = {window_s}
[training]
evaluate = {evaluate}
[aggregation]
max_abs = 8.0
sample_count_max = 1000
{more}
"""


def lifecycle_run(
    more: str = "", count: int = 9, target: int = 1, window_s: float = 600.0, evaluate: str = "false"
) -> str:
    return RUN.format(count=count, target=target, window_s=window_s, evaluate=evaluate, more=more)


async def order(house: House, verb: str, **body: object) -> httpx.Response:
    """POST an operator's order."""
    return await house.http.post(f"/v1/admin/runs/demo/{verb}", content=json.dumps(body), headers=house.admin)


async def obeyed(house: House, verb: str, **body: object) -> Json:
    answer = await order(house, verb, **body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def versions(house: House, query: str = "") -> list[Json]:
    answer = await house.http.get(f"/v1/admin/runs/demo/versions{query}", headers=house.admin)
    assert answer.status_code == 200, answer.text
    return list(answer.json())


async def train(
    device: Device, layout: Layout, value: float, evaluation: Json | None = None, metrics: Json | None = None
) -> Json:
    """Take part in one round of training with an update that is `value` everywhere; its assignment."""
    assignment = await device.work(layout)
    assert assignment["task"] == "training"
    update = update_of(layout, vector(layout, value))
    uploaded = await device.upload(assignment["id"], update)
    assert uploaded.status_code == 201, uploaded.text
    measured: Json = {"evaluation": evaluation, "evaluation_sample_count": 5} if evaluation else {}
    measured |= {"metrics": metrics} if metrics else {}
    answer = await device.report(assignment["id"], update, **measured)
    assert answer.status_code == 200, answer.text
    assert answer.json()["outcome"] == "accepted", answer.text
    return assignment


async def measure(device: Device, assignment: Json, sample_count: int, **evaluation: float) -> httpx.Response:
    body = json.dumps({"sample_count": sample_count, "evaluation": evaluation}).encode()
    return await device.send("PUT", f"/v1/assignments/{assignment['id']}/evaluation", body)


def vector(layout: Layout, value: float) -> Tensor:
    return torch.full((layout.n_values,), value)
