"""The load rows of `umbel bench coordinator`: a fleet of simulated devices against one coordinator process.

Devices enrol over HTTP, each with its own key and token; every request is signed and its nonce durable before the
answer. Check-ins find no work; an empty FastAPI endpoint gets the same bytes over as many connections, in turns. Then
comes one round that asks 300 of all devices and needs 256, and then, on request, a soak.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from umbel.aggregation.model.artifact import encode_model
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.records import RoundRecord
from umbel.aggregation.run.sections import RoundsSection
from umbel.client import Operator
from umbel.sim.bench.coordinator.clients import IdleModel
from umbel.sim.bench.coordinator.http_load import Load, Script, SimDevice, Tally, Until, check_in_body, once, take_part
from umbel.sim.bench.report import BenchFailed, BenchRow, Hold
from umbel.sim.demo.plan import run_toml
from umbel.sim.processes import Child, CoordinatorProcess, start, start_coordinator, stopping

N_CONNECTIONS = 256
TARGET, ASKED = 256, 300
RATE_MIN = 0.4
GROWTH_MAX = 1.1
SOAK_RATE = 500.0
_TOKENS_AT_ONCE = 1000
_BURSTS = 3
_SAMPLES = 10
_WAITING, _ROUND = "nobody-is-enough", "three-hundred"
_SETTLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Soaked:
    """`rss_mb`: resident memory, sampled evenly; `tally`: of the check-ins, each timed from when it was due."""

    rss_mb: tuple[float, ...]
    tally: Tally


def measure(n_devices: int, soak_s: float, *, quick: bool) -> tuple[tuple[BenchRow, ...], tuple[str, ...]]:
    """The rows, and notes on them. Raises `BenchFailed` where an answer is wrong."""
    with tempfile.TemporaryDirectory(prefix="umbel-load-") as folder, stopping([]) as children:
        coordinator = start_coordinator(Path(folder) / "coordinator")
        children.append(coordinator.child)
        empty = start_empty("fastapi", Path(folder))
        children.append(empty)
        fleet = LoadFleet.enrolled(coordinator, n_devices)
        bursts = _in_turns(fleet, empty, n_requests=4000 if quick else 15_000)
        round_s, record = fleet.run_round()
        soaked = fleet.soak(soak_s) if soak_s else None
        coordinator.child.require_alive()
    return _rows(n_devices, bursts, round_s, record, soaked), _notes(fleet, bursts, soaked)


def start_empty(kind: Literal["asgi", "fastapi"], folder: Path) -> Child:
    """An endpoint that does nothing; it prints its address."""
    argv = ["-m", "umbel.sim.bench.coordinator.empty", kind]
    return start("the empty endpoint", argv, folder / "empty.log")


@dataclass(frozen=True, slots=True)
class Burst:
    """As fast as the server answers. `cpu_us`: processor time of the server a request, all threads."""

    rate: float
    p99_ms: float
    cpu_us: float


class LoadFleet:
    """Enrolled devices of one coordinator, and a run that waits for more devices than exist."""

    def __init__(self, coordinator: CoordinatorProcess, devices: list[SimDevice], enrolled: Tally) -> None:
        self.coordinator = coordinator
        self.devices = devices
        self.enrolments = enrolled
        self._layout = Layout.of_state(IdleModel().state_dict())
        self._next = itertools.cycle(devices)

    @classmethod
    def enrolled(cls, coordinator: CoordinatorProcess, n_devices: int) -> "LoadFleet":
        """Enrol all over HTTP, and create the run in which they wait."""
        devices = [SimDevice(f"device-{i:05}") for i in range(n_devices)]
        with Operator(coordinator.url, coordinator.admin_key) as operator:
            tokens = [
                token
                for first in range(0, n_devices, _TOKENS_AT_ONCE)
                for token in operator.create_tokens(min(_TOKENS_AT_ONCE, n_devices - first), labels={"tier": "phone"})
            ]
        requests = (device.enrolment(token, "phone") for device, token in zip(devices, tokens, strict=True))
        with Load(coordinator.url, N_CONNECTIONS) as load:
            tally = load.run(once(request) for request in requests)
        tally.require_all(200)
        fleet = cls(coordinator, devices, tally)
        enough = 2 * n_devices
        fleet._create_run(_WAITING, RoundsSection(1, enough, enough, over_selection=1.0, window_s=600.0))
        return fleet

    def _create_run(self, name: str, rounds: RoundsSection) -> None:
        with Operator(self.coordinator.url, self.coordinator.admin_key) as operator:
            sha256 = operator.upload_model(encode_model(IdleModel().state_dict()))
            operator.create_run(name, run_toml(RunFile(name, rounds)), sha256)

    def check_ins(self) -> Iterator[bytes]:
        """Endless signed check-ins of one device after the other, which find no work."""
        body = check_in_body(_WAITING, self._layout.digest, 10)
        return (device.check_in(body) for device in self._next)

    def burst(self, url: str, pid: int, n_requests: int) -> Burst:
        """Send check-ins, signed beforehand, as fast as they are answered."""
        requests = list(itertools.islice(self.check_ins(), n_requests))
        process = psutil.Process(pid)
        with Load(url, N_CONNECTIONS) as load:
            before_s = _cpu_s(process)
            tally = load.run(once(request) for request in requests)
            cpu_s = _cpu_s(process) - before_s
        tally.require_all(200)
        return Burst(tally.rate, tally.quantile_ms(0.99), 1e6 * cpu_s / n_requests)

    def run_round(self) -> tuple[float, RoundRecord]:
        """One round of all devices: seconds from its creation to its end, and its checked record."""
        self._create_run(_ROUND, RoundsSection(1, TARGET, TARGET, over_selection=ASKED / TARGET, window_s=300.0))
        outcomes: list[str] = []
        started = time.perf_counter()
        with Load(self.coordinator.url, N_CONNECTIONS) as load:
            scripts = (take_part(device, _ROUND, self._layout, outcomes) for device in self.devices)
            load.run(scripts, is_over=lambda: outcomes.count("accepted") >= TARGET)
        record = self._record()
        _check_accounts(record, outcomes)
        return time.perf_counter() - started, record

    def _record(self) -> RoundRecord:
        deadline = time.monotonic() + _SETTLE_S
        with Operator(self.coordinator.url, self.coordinator.admin_key) as operator:
            for progress in operator.follow(_ROUND, wait_s=1.0):
                if progress.ended:
                    return progress.ended[0]
                if time.monotonic() > deadline:
                    break
        raise BenchFailed(f"the round of {ASKED} clients did not end")

    def soak(self, soak_s: float) -> Soaked:
        """Check-ins at a fixed rate, with samples of the memory."""
        process = psutil.Process(self.coordinator.pid)
        samples: list[float] = []
        requests, began = self.check_ins(), time.perf_counter()
        ends_at = began + soak_s

        def stream(number: int) -> Script:
            at, every_s = began + number / SOAK_RATE, N_CONNECTIONS / SOAK_RATE
            while at < ends_at:
                yield Until(at)
                yield next(requests)
                at += every_s

        def sampler() -> Script:
            while len(samples) < 3 * _SAMPLES:
                samples.append(process.memory_info().rss / 1e6)
                yield Until(began + len(samples) * soak_s / (3 * _SAMPLES))

        with Load(self.coordinator.url, N_CONNECTIONS) as load:
            tally = load.run([sampler(), *(stream(number) for number in range(N_CONNECTIONS))])
        tally.require_all(200)
        return Soaked(tuple(samples), tally)


def _in_turns(fleet: LoadFleet, empty: Child, n_requests: int) -> list[tuple[Burst, Burst]]:
    """Ours and the empty endpoint's, one after the other, several times, after one of each to warm up."""
    url = empty.stdout.readline().strip()
    empty.require_alive()
    turns: list[tuple[Burst, Burst]] = []
    for _ in range(1 + _BURSTS):
        ours = fleet.burst(fleet.coordinator.url, fleet.coordinator.pid, n_requests)
        turns.append((ours, fleet.burst(url, empty.process.pid, n_requests)))
    return turns[1:]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _check_accounts(record: RoundRecord, outcomes: list[str]) -> None:
    """Raise `BenchFailed` unless the round's record and the answers to devices agree."""
    counts = {outcome: outcomes.count(outcome) for outcome in set(outcomes)}
    if not record.committed or record.selected != ASKED or record.reported != TARGET:
        raise BenchFailed(
            f"the round accepted {record.reported} reports of {record.selected} clients instead of {TARGET} of "
            f"{ASKED}: {record.reason}"
        )
    if counts.get("accepted") != TARGET or len(outcomes) > ASKED or record.dropped != ASKED - TARGET:
        raise BenchFailed(f"{len(outcomes)} devices reported, with outcomes {counts}; dropped: {record.dropped}")


def _rows(
    n_devices: int, bursts: list[tuple[Burst, Burst]], round_s: float, record: RoundRecord, soaked: Soaked | None
) -> tuple[BenchRow, ...]:
    ours, theirs = (statistics.median(burst.rate for burst in side) for side in zip(*bursts, strict=True))
    what, empty = f"check-ins of {n_devices} devices, signed, durable", "an empty FastAPI endpoint, same bytes"
    p99, empty_p99 = (statistics.median(burst.p99_ms for burst in side) for side in zip(*bursts, strict=True))
    rows = [
        BenchRow(what, ours, empty, theirs, "/s", Hold(RATE_MIN, sense=">=")),
        BenchRow(f"{what}: p99 at saturation", p99, empty, empty_p99, "ms"),
        BenchRow(f"reports counted, {ASKED} of {n_devices} asked", record.reported, "the target", TARGET, "reports"),
        BenchRow(
            f"round of {ASKED} of {n_devices}", round_s, "as many empty requests", _least_s(n_devices, theirs), "s"
        ),
    ]
    if soaked:
        rows += _soak_rows(soaked)
    return tuple(rows)


def _soak_rows(soaked: Soaked) -> list[BenchRow]:
    """The first third is left out: caches fill."""
    third, tally = len(soaked.rss_mb) // 3, soaked.tally
    before, after = max(soaked.rss_mb[third : 2 * third]), max(soaked.rss_mb[-third:])
    what = f"memory, last third of {tally.wall_s / 60:.0f} min"
    p50, p99 = tally.quantile_ms(0.5), tally.quantile_ms(0.99)
    return [
        BenchRow(what, after, "the middle third", before, "MB", Hold(GROWTH_MAX)),
        BenchRow(f"p99 at {SOAK_RATE:.0f} check-ins/s", p99, "p50", p50, "ms"),
    ]


def _least_s(n_devices: int, rate: float) -> float:
    """Each device checks in at least once; those asked also fetch, upload and report."""
    return (n_devices + 3 * ASKED) / rate


def _notes(fleet: LoadFleet, bursts: list[tuple[Burst, Burst]], soaked: Soaked | None) -> tuple[str, ...]:
    ours, theirs = (statistics.median(burst.cpu_us for burst in side) for side in zip(*bursts, strict=True))
    notes = [
        f"Load: {N_CONNECTIONS} connections, median of {_BURSTS} turns. CPU time of a request, all threads: "
        f"{ours:.0f} us, and {theirs:.0f} us at the empty endpoint. {fleet.enrolments.rate:.0f} enrolments a second.",
    ]
    if soaked:
        notes.append("Soak: resident MB " + ", ".join(f"{mb:.0f}" for mb in soaked.rss_mb[:: max(1, _SAMPLES // 3)]))
    return tuple(notes)
