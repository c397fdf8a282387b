"""Two hosts on one machine: network namespaces joined by a veth pair, shaped both ways, cut and unplugged at will.

Needs root, iproute2 and a kernel that allows it; `why_not` says what is missing.
"""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.repository import ROOT
from tests.servers.waits import wait_until

COORDINATOR_IP, CLIENT_IP = "10.99.0.1", "10.99.0.2"
PORT = 8750
_LINK = "eth0"


def why_not() -> str:
    """Why such hosts cannot be had here, empty if they can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if missing := [tool for tool in ("ip", "tc", "ss") if shutil.which(tool) is None]:
        return f"needs {' and '.join(missing)} (Debian: iproute2)"
    probe = f"umbel-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode != 0:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return ""


@dataclass(slots=True)
class Host:
    """One namespace. `name`: as `ip netns` knows it."""

    name: str

    def run(self, *command: str) -> str:
        return subprocess.run(
            ["ip", "netns", "exec", self.name, *command], check=True, capture_output=True, text=True, timeout=60
        ).stdout

    def umbel(self, *arguments: str, cwd: Path, **environment: str) -> "subprocess.Popen[str]":
        """A command of umbel's on this host; its standard error goes to a file in `cwd`."""
        with (cwd / f"{arguments[0]}.log").open("a") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, sys.executable, "-m", "umbel", *arguments],
                cwd=cwd,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )


def received_bytes(pid: int) -> int:
    """What has come over the link to the host of this process, headers included."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith(f"{_LINK}:"))


@dataclass(slots=True)
class TwoHosts:
    """`n_cuts`: how often a connection was reset."""

    coordinator: Host
    client: Host
    n_cuts: int = field(default=0, init=False)

    def shape(self, mbit_s: float) -> None:
        """Both ways. The queue is long, as on real access links; a short one drops in bursts that no real one does."""
        for host in (self.coordinator, self.client):
            shape = ["rate", f"{mbit_s:g}mbit", "burst", "64kb", "limit", "30mb"]
            host.run("tc", "qdisc", "replace", "dev", _LINK, "root", "tbf", *shape)

    def cut(self) -> None:
        """Reset every connection between the two, from the coordinator's end: the client hears of it by the line."""
        cut = ("ss", "-KHtn", "state", "established", "dst", CLIENT_IP)
        wait_until("a connection that ss -K can cut", lambda: self.coordinator.run(*cut).strip())
        self.n_cuts += 1

    def unplug(self, seconds: float) -> None:
        """Nothing passes for so long, and nobody is told."""
        self.coordinator.run("ip", "link", "set", _LINK, "down")
        time.sleep(seconds)
        self.coordinator.run("ip", "link", "set", _LINK, "up")


@contextmanager
def two_hosts() -> Generator[TwoHosts]:
    hosts = TwoHosts(Host(f"umbel-{os.getpid()}-a"), Host(f"umbel-{os.getpid()}-b"))
    pair = (hosts.coordinator, hosts.client)
    try:
        for host in pair:
            subprocess.run(["ip", "netns", "add", host.name], check=True)
        ends = [["name", _LINK, "netns", host.name] for host in pair]
        subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True)
        for host, address in zip(pair, (COORDINATOR_IP, CLIENT_IP), strict=True):
            host.run("ip", "address", "add", f"{address}/24", "dev", _LINK)
            host.run("ip", "link", "set", _LINK, "up")
            host.run("ip", "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in pair:
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)


Incident = tuple[int, Callable[[], None]]


class Meter:
    """Reads a counter every 20 ms: what has come over the link when, and whom to call at which byte."""

    def __init__(self, pid: int, incidents: Sequence[Incident]) -> None:
        """`pid`: of a process on the receiving host. `incidents`: what to do after so many bytes, in order."""
        self._pid, self._incidents = pid, list(incidents)
        self._ended = threading.Event()
        self._samples: list[tuple[float, int]] = []

    @contextmanager
    def running(self) -> Generator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    @property
    def n_bytes(self) -> int:
        return self._samples[-1][1] - self._samples[0][1]

    def busy_s(self) -> float:
        """From the first to the last byte, all but what little a client says before and after."""
        first, last = self._samples[0][1], self._samples[-1][1]
        little = (last - first) // 500
        starts = (at for at, n_bytes in self._samples if n_bytes - first > little)
        ends = (at for at, n_bytes in self._samples if last - n_bytes <= little)
        return next(ends) - next(starts)

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            self._samples.append((time.monotonic(), received_bytes(self._pid)))
            received = self.n_bytes
            while self._incidents and received >= self._incidents[0][0]:
                self._incidents.pop(0)[1]()
