"""Links between the ranks: none (the loopback), links of a given rate, and links of a given rate and delay.

rank 0: eth0 =========== port0 [switch] port1 =========== eth0: rank 1      a rate: token buckets (tc tbf)
        up                 down           down               up

rank 0: tun0 ------------------ relay ------------------- tun0: rank 1      a rate and a delay: `relay.py`
"""

import contextlib
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from umbel.sim.bench.collective.hosts import Host, address, hosts, run
from umbel.sim.bench.collective.relay import INTERFACE as RELAYED
from umbel.sim.bench.collective.relay import MTU
from umbel.sim.processes import start, stopping, wait_until

_SWITCHED, _BRIDGE = "eth0", "switch"
# The queue is long, as on real access links. A short one drops packets in bursts, and each burst costs a time-out.
_BURST, _QUEUE = "64kb", "30mb"
_RELAY, _RELAY_STARTS_S = "umbel.sim.bench.collective.relay", 60.0
_TUN_QUEUE = 10_000  # packets: more than TCP has on its way, so that none is dropped


class Link(Protocol):
    """Where ranks run, and by which interface they reach each other."""

    @property
    def title(self) -> str: ...

    @property
    def mbit_s(self) -> float | None:
        """Of each rank, both ways; None without a limit."""
        ...

    @property
    def round_trip_ms(self) -> float: ...

    @property
    def interface(self) -> str: ...

    @property
    def is_counted(self) -> bool:
        """Whether only the ranks use the interface, so that its counter has their bytes."""
        ...

    def prefix(self, rank: int) -> Sequence[str]:
        """The command that runs a program where this rank is."""
        ...


@dataclass(frozen=True, slots=True)
class Loopback:
    """All ranks on this machine, without a network between them."""

    title: str = "loopback"
    mbit_s: float | None = None
    round_trip_ms: float = 0.0
    interface: str = "lo"
    is_counted: bool = False

    def prefix(self, rank: int) -> Sequence[str]:
        return ()


@dataclass(frozen=True, slots=True)
class ShapedLink:
    """Hosts whose links let `mbit_s` pass, each way."""

    hosts: Sequence[Host]
    mbit_s: float
    round_trip_ms: float = 0.0
    interface: str = _SWITCHED
    is_counted: bool = True

    @property
    def title(self) -> str:
        delay = f", {self.round_trip_ms:g} ms round trip" if self.round_trip_ms else ""
        return f"{self.mbit_s:g} Mbit/s{delay}"

    def prefix(self, rank: int) -> Sequence[str]:
        return self.hosts[rank].prefix


@contextlib.contextmanager
def with_rate(n_ranks: int, mbit_s: float) -> Generator[Link]:
    """Ranks that reach each other through a switch. Raises `BenchFailed`."""
    with hosts(n_ranks + 1) as made:
        *ends, switch = made
        switch.run("ip", "link", "add", _BRIDGE, "type", "bridge")
        switch.run("ip", "link", "set", _BRIDGE, "up")
        for number, host in enumerate(ends):
            port = f"port{number}"
            pair = ("name", _SWITCHED, "netns", str(host.pid)), ("name", port, "netns", str(switch.pid))
            run("ip", "link", "add", *pair[0], "type", "veth", "peer", *pair[1])
            host.run("ip", "address", "add", f"{address(number)}/24", "dev", _SWITCHED)
            host.run("ip", "link", "set", _SWITCHED, "up")
            switch.run("ip", "link", "set", port, "master", _BRIDGE, "up")
            _shape(host, _SWITCHED, mbit_s)
            _shape(switch, port, mbit_s)
        yield ShapedLink(ends, mbit_s)


@contextlib.contextmanager
def with_rate_and_delay(n_ranks: int, mbit_s: float, round_trip_ms: float) -> Generator[Link]:
    """Ranks whose packets a process relays. Raises `BenchFailed`, `ChildDied` and `TimeoutError`."""
    with tempfile.TemporaryDirectory(prefix="umbel-") as folder, hosts(n_ranks) as made, stopping([]) as children:
        argv = ["-m", "umbel.sim.processes", _RELAY, f"{mbit_s:g}", f"{round_trip_ms:g}", *(str(i.pid) for i in made)]
        log = Path(folder) / "relay.log"
        children.append(start("the relay", argv, log))
        wait_until(lambda: _has(made[-1], RELAYED), children, _RELAY_STARTS_S, "the relay to start")
        for number, host in enumerate(made):
            host.run("ip", "address", "add", f"{address(number)}/24", "dev", RELAYED)
            host.run("ip", "link", "set", RELAYED, "mtu", str(MTU), "txqueuelen", str(_TUN_QUEUE), "up")
        yield ShapedLink(made, mbit_s, round_trip_ms, RELAYED)


def _has(host: Host, interface: str) -> bool:
    return f"{interface}:" in Path(f"/proc/{host.pid}/net/dev").read_text()


def _shape(host: Host, interface: str, mbit_s: float) -> None:
    words = ("rate", f"{mbit_s:g}mbit", "burst", _BURST, "limit", _QUEUE)
    host.run("tc", "qdisc", "replace", "dev", interface, "root", "tbf", *words)
