"""Hosts on one machine, each behind a link of its own: network namespaces that are joined by a switch, and shaped.

    rank 0: eth0 =========== port0 [switch] port1 =========== eth0: rank 1
            tbf up        tbf down          tbf down        tbf up

A namespace here has no name and no file. It belongs to a process that waits for the end of its standard input, so it is
gone when this process is gone, however that ends. All interfaces are made inside the namespaces: those of the machine
are neither used nor changed.

Each host has a host name and an /etc/hosts of its own, because Gloo asks for the address of its host's name.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from umbel.sim.bench.report import BenchFailed

_TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
_NEW = ("unshare", "--net", "--uts", "--mount")
_INTO = ("--net", "--uts", "--mount")
_HOLD = 'mount --bind "$1" /etc/hosts && echo "$2" > /proc/sys/kernel/hostname && echo ready && exec cat'
_INTERFACE, _BRIDGE = "eth0", "switch"
_COMMAND_S = 60.0
# The queue is long, as on real access links. A short one drops packets in bursts, and each burst costs a time-out.
_BURST, _QUEUE = "64kb", "30mb"


def why_not() -> str:
    """Why there can be no hosts here; empty if there can."""
    if sys.platform != "linux":
        return "links are shaped with network namespaces, which only Linux has"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} cannot be found (Debian: iproute2, util-linux, mount)"
    try:
        with hosts(1) as made:
            made[0].run("tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *_shape(100.0))
    except BenchFailed as error:
        return str(error)
    return ""


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace. `pid`: of the process that holds it."""

    name: str
    pid: int

    @property
    def prefix(self) -> Sequence[str]:
        """The command that runs another one there, in the folder of this process."""
        return ("nsenter", f"--target={self.pid}", *_INTO, f"--wd={os.getcwd()}")

    def run(self, *command: str) -> None:
        """Raises `BenchFailed`."""
        _run(*self.prefix, *command)


@dataclass(frozen=True, slots=True)
class ShapedLink:
    """Hosts whose links let `mbit_s` pass, each way."""

    hosts: Sequence[Host]
    mbit_s: float
    round_trip_ms: float = 0.0
    interface: str = _INTERFACE
    is_counted: bool = True
    title: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", title_of(self.mbit_s, self.round_trip_ms))

    def prefix(self, rank: int) -> Sequence[str]:
        return self.hosts[rank].prefix


def title_of(mbit_s: float, round_trip_ms: float) -> str:
    """Of a link, for tables."""
    return f"{mbit_s:g} Mbit/s" + (f", {round_trip_ms:g} ms round trip" if round_trip_ms else "")


@contextlib.contextmanager
def hosts(n_hosts: int) -> Generator[list[Host]]:
    """Hosts without a network. Raises `BenchFailed`."""
    with tempfile.TemporaryDirectory(prefix="umbel-") as folder, contextlib.ExitStack() as held:
        made = list[Host]()
        for number in range(n_hosts):
            name = f"umbel-{number}"
            names = Path(folder) / name
            names.write_text(f"127.0.0.1 localhost\n{address(number)} {name}\n")
            made.append(held.enter_context(_held(name, names)))
            made[-1].run("ip", "link", "set", "lo", "up")
        yield made


def address(number: int) -> str:
    """Of a host."""
    return f"10.99.0.{number + 1}"


@contextlib.contextmanager
def _held(name: str, names: Path) -> Generator[Host]:
    process = subprocess.Popen(
        [*_NEW, "sh", "-c", _HOLD, "sh", str(names), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a Ctrl-C at the terminal is for the benchmark, which then ends its ranks first
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if (words := process.stdout.readline().strip()) != "ready":
            raise BenchFailed(f"cannot make a network namespace here: {words}")
        yield Host(name, process.pid)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@contextlib.contextmanager
def switched(n_hosts: int) -> Generator[list[Host]]:
    """Hosts that reach each other through a switch, at any rate. Raises `BenchFailed`."""
    with hosts(n_hosts + 1) as made:
        *ends, switch = made
        switch.run("ip", "link", "add", _BRIDGE, "type", "bridge")
        switch.run("ip", "link", "set", _BRIDGE, "up")
        for number, host in enumerate(ends):
            pair = ("name", _INTERFACE, "netns", str(host.pid)), ("name", _port(number), "netns", str(switch.pid))
            _run("ip", "link", "add", *pair[0], "type", "veth", "peer", *pair[1])
            host.run("ip", "address", "add", f"{address(number)}/24", "dev", _INTERFACE)
            host.run("ip", "link", "set", _INTERFACE, "up")
            switch.run("ip", "link", "set", _port(number), "master", _BRIDGE, "up")
        yield made


def shape(switched_hosts: Sequence[Host], mbit_s: float) -> ShapedLink:
    """Give each of the hosts this rate, up and down; at any time."""
    *ends, switch = switched_hosts
    for number, host in enumerate(ends):
        host.run("tc", "qdisc", "replace", "dev", _INTERFACE, "root", "tbf", *_shape(mbit_s))
        switch.run("tc", "qdisc", "replace", "dev", _port(number), "root", "tbf", *_shape(mbit_s))
    return ShapedLink(ends, mbit_s)


def _shape(mbit_s: float) -> Sequence[str]:
    return ("rate", f"{mbit_s:g}mbit", "burst", _BURST, "limit", _QUEUE)


def _port(number: int) -> str:
    return f"port{number}"


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMMAND_S)
    except subprocess.CalledProcessError as error:
        raise BenchFailed(f"{' '.join(command)!r} failed: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchFailed(f"{' '.join(command)!r} failed: {error}") from error
