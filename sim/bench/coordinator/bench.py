"""`umbel bench coordinator`: how long a round without work takes.

Ours: a real coordinator process (SQLite, every report durable before the answer) and ten real SDK clients over HTTP on
loopback. A round lasts from its opening to the next round's, so that the time between rounds counts.
The limit: the same number of requests of the same size, at the same time, to an application that does nothing.
The peer: Flower's deployment engine, if `--peer-python` names an interpreter that has it.
"""

import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import httpx
from pydantic import TypeAdapter

from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.records import RoundRecord
from umbel.aggregation.run.sections import RoundsSection
from umbel.client import Operator
from umbel.sim.bench.coordinator import load
from umbel.sim.bench.coordinator.clients import IdleModel
from umbel.sim.bench.coordinator.flower import PUBLISHED_ROUND_S, flower_round_s
from umbel.sim.bench.coordinator.load import start_empty
from umbel.sim.bench.report import BenchRow, Hold, Report
from umbel.sim.demo.client import DemoSite
from umbel.sim.demo.plan import run_toml
from umbel.sim.processes import Child, start, start_coordinator, stopping

N_CLIENTS = 10
RUN = "bench"
ROUND_S_MAX = 0.3
# One client's requests in one round: check in, fetch the model, upload, report. Sizes in bytes, as umbel sends them.
REQUESTS = (("POST", 150), ("GET", 0), ("POST", 104), ("PUT", 190))
_HEADERS = {"Signature-Input": "s" * 200, "Signature": "s" * 100, "Content-Digest": "d" * 54}
_WARM_UP = 5
_LIMIT_S = 120.0


def measure(*, quick: bool, peer_python: Path | None, n_devices: int = 10_000, soak_s: float = 0.0) -> Report:
    """Run the benchmark. Raises `ChildDied`, `TimeoutError` or `BenchFailed`."""
    n_rounds = 15 if quick else 40
    ours = coordinator_round_s(n_rounds)
    limit = limit_round_s(n_rounds)
    peer, against = _peer(peer_python, n_rounds=3 if quick else 5)
    what = f"zero-work round, {N_CLIENTS} clients, HTTP on loopback"
    rows = (
        BenchRow(what, ours, against, peer, "s", Hold(ROUND_S_MAX, of="ours")),
        BenchRow(what, ours, f"{len(REQUESTS) * N_CLIENTS} bare requests to an empty endpoint", limit, "s"),
    )
    load_rows, load_notes = load.measure(n_devices, soak_s, quick=quick)
    notes = (f"Median of {n_rounds} rounds, after {_WARM_UP} rounds to warm up.", *load_notes)
    return Report("coordinator", rows + load_rows, notes)


def coordinator_round_s(n_rounds: int) -> float:
    """Median seconds from one round's opening to the next one's."""
    with tempfile.TemporaryDirectory(prefix="umbel-bench-") as folder, stopping([]) as children:
        coordinator = start_coordinator(Path(folder) / "coordinator")
        children.append(coordinator.child)
        with Operator(coordinator.url, coordinator.admin_key) as operator:
            rounds = RoundsSection(_WARM_UP + n_rounds + 1, N_CLIENTS, N_CLIENTS, over_selection=1.0, window_s=60.0)
            sha256 = operator.upload_model(encode_model(IdleModel().state_dict()))
            operator.create_run(RUN, run_toml(RunFile(RUN, rounds)), sha256)
            clients = _start_clients(Path(folder), coordinator.url, operator.create_tokens(N_CLIENTS))
            children.append(clients)
            opened = [record.opened_at for record in _finish(operator, [coordinator.child, clients])]
    steps = [later - earlier for earlier, later in pairwise(opened)]
    return statistics.median(steps[_WARM_UP:])


def _start_clients(folder: Path, url: str, tokens: list[str]) -> Child:
    sites = [DemoSite(f"idle-{i}", str(folder / f"idle-{i}"), url, RUN, token, 0.0) for i, token in enumerate(tokens)]
    child = start("the clients' process", ["-m", "umbel.sim.bench.coordinator.clients"], folder / "clients.log")
    child.stdin.write(TypeAdapter(list[DemoSite]).dump_json(sites).decode() + "\n")
    child.stdin.flush()
    return child


def _finish(operator: Operator, children: list[Child]) -> list[RoundRecord]:
    """Wait for the run to finish; return its rounds."""
    records: list[RoundRecord] = []
    deadline = time.monotonic() + _LIMIT_S
    for progress in operator.follow(RUN, wait_s=1.0):
        records += [record for record in progress.ended if record.committed]
        for child in children:
            child.require_alive(may_finish=True)
        if time.monotonic() > deadline:
            raise TimeoutError(f"the rounds did not finish within {_LIMIT_S:.0f} s")
    return records


def limit_round_s(n_rounds: int) -> float:
    """Median seconds that the same requests take, from the same number of threads, to an endpoint that does nothing."""
    with tempfile.TemporaryDirectory(prefix="umbel-bench-") as folder, stopping([]) as children:
        server = start_empty("asgi", Path(folder))
        children.append(server)
        url = server.stdout.readline().strip()
        server.require_alive()
        times: list[float] = []
        barrier = threading.Barrier(N_CLIENTS, action=lambda: times.append(time.perf_counter()))
        threads = [threading.Thread(target=_ask, args=(url, _WARM_UP + n_rounds, barrier)) for _ in range(N_CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    steps = [later - earlier for earlier, later in pairwise(times)]
    return statistics.median(steps[_WARM_UP:])


def _ask(url: str, n_rounds: int, barrier: threading.Barrier) -> None:
    with httpx.Client(base_url=url, headers=_HEADERS) as client:
        for _ in range(n_rounds):
            barrier.wait(_LIMIT_S)
            for method, n_bytes in REQUESTS:
                client.request(method, "/", content=b"x" * n_bytes).raise_for_status()
        barrier.wait(_LIMIT_S)


def _peer(peer_python: Path | None, n_rounds: int) -> tuple[float, str]:
    if peer_python is None:
        return PUBLISHED_ROUND_S, "Flower 1.41 deployment: its reported 6.7-10 s, NOT measured in this run"
    return flower_round_s(peer_python, N_CLIENTS, n_rounds), "Flower's deployment engine, SuperLink and 10 SuperNodes"
