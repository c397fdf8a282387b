"""`umbel bench aggregate`: the coordinator's memory under forty uploads at once, and how fast updates are folded.

Memory is the resident set of a real coordinator process while forty clients upload over HTTP. Its growth counts from
before the run was created, after a small run to warm up, so everything that the model costs is included. The baseline
in this process keeps every update and takes the mean of the stack, as peers do.
"""

import gc
import hashlib
import io
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from umbel.aggregation.messages import CheckIn, Outcome
from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import Grid
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.sections import RoundsSection
from umbel.aggregation.types import RunId
from umbel.aggregation.update.grid import GridAccumulator
from umbel.aggregation.update.wire import float32_header
from umbel.client import Operator
from umbel.client.state.enrol import ensure_enrolled, identify
from umbel.client.state.store import Store
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.timing import Bandwidth
from umbel.client.wire.transport import Patience, Transport, connect
from umbel.client.wire.upload import Upload
from umbel.sim.bench.measuring import MB, RssPeak, least_ms
from umbel.sim.bench.report import BenchRow, Hold, Report
from umbel.sim.demo.plan import run_toml
from umbel.sim.processes import start_coordinator, stopping

N_CLIENTS = 40
N_VALUES = 2_500_000  # 10 MB of float32
N_VALUES_WARM_UP = 10_000
GROWTH_MAX = 4.0  # models
_LIMIT_S = 240.0


def measure(*, quick: bool) -> Report:
    """Run the benchmark. `quick`: fewer repetitions of the kernels; the uploads are the same."""
    torch.set_num_threads(1)
    model_mb = N_VALUES * 4 / MB
    grown = coordinator_growth_mb()
    naive = naive_growth_mb()
    fold, add, copy = fold_speeds(repetitions=7 if quick else 27)
    uploads = f"memory growth, {N_CLIENTS} uploads of {model_mb:.0f} MB"
    rows = (
        BenchRow(uploads, grown.peak_mb, f"the model, {model_mb:.0f} MB", model_mb, "MB", Hold(GROWTH_MAX)),
        BenchRow(uploads, grown.peak_mb, "keep all, then the mean of the stack", naive, "MB"),
        BenchRow("adding one update to the sum", fold, "plain float add_(x, alpha=w)", add, "GB/s"),
        BenchRow("adding one update to the sum", fold, "memory copy", copy, "GB/s"),
    )
    took = f"{N_CLIENTS} uploads over HTTP, each checked, stored and added up, took {grown.wall_s:.1f} s."
    return Report("aggregate", rows, (took, "GB/s: float32 bytes of the update per second, on one thread."))


@dataclass(frozen=True, slots=True)
class Growth:
    """`peak_mb`: growth of the resident set; `wall_s`: from the first upload's start to the commit."""

    peak_mb: float
    wall_s: float


def coordinator_growth_mb() -> Growth:
    """Forty clients upload at once to a new coordinator after a small round."""
    with tempfile.TemporaryDirectory(prefix="umbel-bench-") as folder, stopping([]) as children:
        coordinator = start_coordinator(Path(folder) / "coordinator")
        children.append(coordinator.child)
        with Operator(coordinator.url, coordinator.admin_key) as operator:
            tokens = operator.create_tokens(N_CLIENTS)
            sites = [_enrolled(Path(folder), coordinator.url, i, token) for i, token in enumerate(tokens)]
            _run_round(operator, sites, "warm-up", N_VALUES_WARM_UP)
            rss = RssPeak(coordinator.pid)
            before_mb = rss.now_mb()
            with rss.sampling():
                wall_s = _run_round(operator, sites, "large", N_VALUES)
            coordinator.child.require_alive()
    return Growth(rss.peak_mb - before_mb, wall_s)


def _enrolled(folder: Path, url: str, number: int, token: str) -> CoordinatorClient:
    name = f"site-{number:02}"
    store = Store(folder / name, url)
    identity = identify(store, name, token)
    coordinator = CoordinatorClient(Transport(connect(url), identity.authorize))
    ensure_enrolled(coordinator, store, identity, token, {})
    return coordinator


def _run_round(operator: Operator, sites: Sequence[CoordinatorClient], run: str, n_values: int) -> float:
    """One round in which every site sends a random update; seconds from the uploads' start to the new model."""
    state = {"weights": torch.zeros(n_values)}
    rounds = RoundsSection(1, len(sites), len(sites), over_selection=1.0, window_s=_LIMIT_S)
    operator.create_run(run, run_toml(RunFile(run, rounds)), operator.upload_model(encode_model(state)))
    layout = Layout.of_state(state)
    header = float32_header(layout).encode()
    updates = [header + _random(n_values, seed).numpy().tobytes() for seed in range(4)]
    gate = threading.Barrier(len(sites) + 1)
    with ThreadPoolExecutor(len(sites)) as pool:
        sent = [pool.submit(_send, site, run, layout, updates[i % 4], gate) for i, site in enumerate(sites)]
        gate.wait(_LIMIT_S)
        started = time.perf_counter()
        for future in sent:
            future.result()
    operator.progress(run, after=0, wait_s=20.0)
    return time.perf_counter() - started


def _send(site: CoordinatorClient, run: str, layout: Layout, update: bytes, gate: threading.Barrier) -> None:
    checked_in = site.check_in(CheckIn(RunId(run), 100, layout.digest))
    if checked_in.assignment is None:
        gate.abort()
        raise TimeoutError(f"no assignment came: {checked_in.reason}")
    assignment = checked_in.assignment.id
    sha256 = hashlib.sha256(update).hexdigest()
    gate.wait(_LIMIT_S)
    upload = Upload(site, assignment, io.BytesIO(update), len(update), sha256, Bandwidth(), _LIMIT_S)
    upload.send(Patience(until=time.monotonic() + _LIMIT_S), resume=False)
    answer = site.report(assignment, WorkDone(100, 1, 1, sha256))
    if answer.outcome is not Outcome.ACCEPTED:
        raise TimeoutError(f"a report was not accepted: {answer.reason}")


def naive_growth_mb() -> float:
    """The memory to keep forty updates and average the stack."""
    gc.collect()
    rss = RssPeak(psutil.Process().pid)
    before_mb = rss.now_mb()
    with rss.sampling():
        updates = [_random(N_VALUES, seed) for seed in range(N_CLIENTS)]
        torch.stack(updates).mean(0)
    return rss.peak_mb - before_mb


def fold_speeds(repetitions: int) -> list[float]:
    """GB/s of float32 for: check and fold into the integer sum; a float add with a weight; a copy."""
    update, total, weight = _random(N_VALUES, 0), torch.zeros(N_VALUES), 100
    grid = Grid.finest(max_abs=64.0, total_weight_max=N_CLIENTS << 20)
    accumulator = GridAccumulator(N_VALUES, grid)
    least = least_ms(
        (
            lambda: accumulator.fold_vector(update, weight),
            lambda: total.add_(update, alpha=weight),
            lambda: total.copy_(update),
        ),
        repetitions,
    )
    return [N_VALUES * 4 / 1e6 / ms for ms in least]


def _random(n_values: int, seed: int) -> Tensor:
    return torch.randn(n_values, generator=torch.Generator().manual_seed(seed)) * 0.01
