"""A thousand clients of a round hold half an upload each, signed and theirs to send; the others end it all the same."""

import hashlib
import itertools
import json
import resource
import socket
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import RoundsSection
from umbel.aggregation.trust.signatures import content_digest
from umbel.aggregation.update.wire import float32_header
from umbel.client import Operator
from umbel.sim.bench.coordinator.http_load import SAMPLE_COUNT, Load, Script, SimDevice, Until, check_in_body, once
from umbel.sim.demo.plan import run_toml
from umbel.sim.processes import CoordinatorProcess, start_coordinator, stopping

N_HONEST, ASKED_FOR_EACH = 112, 10
N_HALF_OPEN = N_HONEST * (ASKED_FOR_EACH - 1)
ROUND_S_MAX = 20.0
MB_EACH_MAX = 0.2
N_CONNECTIONS = 64
STATE = {"weight": torch.zeros(40_000)}
LAYOUT = Layout.of_state(STATE)
UPDATE = float32_header(LAYOUT).encode() + bytes(4 * LAYOUT.n_values)
HALF = len(UPDATE) // 2
PARTIAL = {"Content-Type": "application/partial-upload", "Upload-Offset": str(HALF), "Upload-Complete": "?1"}
WHOLE = {"Upload-Length": str(len(UPDATE)), "Repr-Digest": content_digest(hashlib.sha256(UPDATE).digest())}


@contextmanager
def many_files() -> Generator[None]:
    """As many open files as this machine allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def begun(coordinator: CoordinatorProcess) -> list[SimDevice]:
    """A run whose only round asks all of these enrolled devices, for the reports of a tenth of them."""
    rounds = RoundsSection(1, N_HONEST, N_HONEST, over_selection=float(ASKED_FOR_EACH), window_s=300.0)
    devices = [SimDevice(f"device-{i:04}") for i in range(N_HONEST * ASKED_FOR_EACH)]
    with Operator(coordinator.url, coordinator.admin_key) as operator:
        operator.create_run("demo", run_toml(RunFile("demo", rounds)), operator.upload_model(encode_model(STATE)))
        tokens = list(itertools.chain(*(operator.create_tokens(len(devices) // 2) for _ in range(2))))
    enrolments = (one.enrolment(token, "phone") for one, token in zip(devices, tokens, strict=True))
    play(coordinator, [once(enrolment) for enrolment in enrolments], 200)
    return devices


def play(
    coordinator: CoordinatorProcess, scripts: list[Script], status: int, n_connections: int = N_CONNECTIONS
) -> None:
    with Load(coordinator.url, n_connections) as load:
        load.run(scripts).require_all(status)


def find_work(device: SimDevice, found: dict[SimDevice, str]) -> Script:
    """Check in, and wait there, until there is an assignment: so all of them wait at the same time."""
    body = check_in_body("demo", LAYOUT.digest, SAMPLE_COUNT, wait_s=25.0)
    while device not in found:
        answer = yield device.check_in(body)
        checked_in = json.loads(answer.body)
        if checked_in["assignment"]:
            found[device] = f"/v1/assignments/{checked_in['assignment']['id']}"
        else:
            yield Until(time.perf_counter() + float(checked_in["retry_after_s"]))


def first_half(device: SimDevice, work: str) -> bytes:
    return device.request("POST", f"{work}/update", UPDATE[:HALF], WHOLE | {"Upload-Complete": "?0"})


def second_half(device: SimDevice, work: str) -> bytes:
    return device.request("PATCH", f"{work}/update", UPDATE[HALF:], PARTIAL)


def take_part(device: SimDevice, work: str, outcomes: list[str]) -> Script:
    """Upload in two chunks, and report."""
    yield first_half(device, work)
    yield second_half(device, work)
    answer = yield device.report(work.rpartition("/")[2], UPDATE)
    outcomes.append(json.loads(answer.body)["outcome"])


def half_open(coordinator: CoordinatorProcess, found: dict[SimDevice, str]) -> Iterator[socket.socket]:
    """One connection for each: some send only a head, some nearly all of it, some nearly all of their second chunk."""
    in_two = [(device, work) for i, (device, work) in enumerate(found.items()) if i % 3 == 2]
    play(coordinator, [once(first_half(device, work)) for device, work in in_two], 201)
    host, port = coordinator.url.removeprefix("http://").split(":")
    for i, (device, work) in enumerate(found.items()):
        begin = device.request("POST", f"{work}/update", UPDATE, WHOLE | {"Upload-Complete": "?1"})
        sent = (begin[: -len(UPDATE)], begin[:-1], second_half(device, work)[:-1])[i % 3]
        line = socket.create_connection((host, int(port)), timeout=30.0)
        line.sendall(sent)
        yield line


@pytest.mark.realtime
def test_a_round_ends_while_a_thousand_of_its_clients_hold_half_an_upload_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMBEL_CHECK_INS_PER_S_MAX", "100000")  # else a fleet of more than 1,000 is spread over time
    outcomes: list[str] = []
    found: dict[SimDevice, str] = {}
    with many_files(), stopping([]) as children, ExitStack() as lines:
        coordinator = start_coordinator(tmp_path / "data")
        children.append(coordinator.child)
        devices, process = begun(coordinator), psutil.Process(coordinator.pid)
        play(coordinator, [find_work(device, found) for device in devices], 200, len(devices))
        honest = [(device, found.pop(device)) for device in devices[:N_HONEST]]
        before_mb = process.memory_info().rss / 1e6
        opened = [lines.enter_context(line) for line in half_open(coordinator, found)]
        assert len(opened) == N_HALF_OPEN >= 1000
        started = time.monotonic()
        with Load(coordinator.url, N_CONNECTIONS) as load:
            tally = load.run([take_part(device, work, outcomes) for device, work in honest])
        with Operator(coordinator.url, coordinator.admin_key) as operator:
            record = next(seen.ended[0] for seen in operator.follow("demo", wait_s=5.0) if seen.ended)
        took_s, grown_mb = time.monotonic() - started, process.memory_info().rss / 1e6 - before_mb
    print(f"round {took_s:.1f} s, p95 {tally.quantile_ms(0.95):.0f} ms, {grown_mb:.0f} MB more")
    assert outcomes == ["accepted"] * N_HONEST
    assert record.committed
    assert record.reported == N_HONEST
    assert took_s < ROUND_S_MAX
    assert grown_mb < MB_EACH_MAX * N_HALF_OPEN
