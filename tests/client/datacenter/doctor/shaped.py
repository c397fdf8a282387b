"""Ranks in network namespaces of their own, whose links have a bandwidth: for tests that run as root on Linux.

Each rank has an interface `eth0` on one bridge. What it sends is shaped there (`tc`), and what it receives is shaped at
the bridge. Queues are long, because losses would stall TCP.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

CAN_SHAPE = sys.platform == "linux" and os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc")))
_PORT = "29517"  # in a namespace, where no other process is


@contextmanager
def namespaces(n: int, megabits: float, slower: Mapping[tuple[int, int], float] | None = None) -> Generator[list[str]]:
    """The names of `n` namespaces, each of which sends `megabits` Mbit/s. `slower`: those between two, both ways."""
    own = f"u{os.getpid() % 100_000}"
    names = [f"{own}n{i}" for i in range(n)]
    try:
        _do(f"ip link add {own} type bridge", f"ip link set {own} up")
        for i, name in enumerate(names):
            _do(f"ip netns add {name}", f"ip link add {own}v{i} type veth peer name eth0 netns {name}")
            _do(f"ip link set {own}v{i} master {own} up")
            _do(f"tc qdisc add dev {own}v{i} root tbf rate {megabits}mbit burst 64kb limit 30mb")
            inside = f"ip netns exec {name}"
            _do(f"{inside} ip address add {address(i)}/24 dev eth0", f"{inside} ip link set eth0 up")
            _do(f"{inside} ip link set lo up", f"{inside} tc qdisc add dev eth0 root handle 1: htb default 1")
            slow = {b if a == i else a: rate for (a, b), rate in (slower or {}).items() if i in (a, b)}
            for number, (other, rate) in enumerate([(None, megabits), *slow.items()], 1):
                add = f"{inside} tc class add dev eth0 parent 1: classid 1:{number} htb"
                _do(f"{add} rate {rate}mbit burst 64kb")
                _do(f"{inside} tc qdisc add dev eth0 parent 1:{number} bfifo limit 30mb")
                if other is not None:
                    match = f"match ip dst {address(other)}/32 flowid 1:{number}"
                    _do(f"{inside} tc filter add dev eth0 parent 1: protocol ip prio 1 u32 {match}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", own], capture_output=True)


def address(number: int) -> str:
    """Of the namespace with this number."""
    return f"10.213.7.{number + 1}"


def ranks_in(
    names: Sequence[str], command: Sequence[str], timeout_s: float = 240.0, folder: Path | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """Run `python COMMAND` once in each namespace, as the ranks of one job."""
    prefixes = [("ip", "netns", "exec", name) for name in names]
    return ranks_behind(prefixes, address(0), command, timeout_s, folder)


def ranks_behind(
    prefixes: Sequence[Sequence[str]],
    first: str,
    command: Sequence[str],
    timeout_s: float = 240.0,
    folder: Path | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """Run `PREFIX python COMMAND` for each prefix, as the ranks of one job. `first`: the address of rank 0."""
    usual = {"WORLD_SIZE": str(len(prefixes)), "MASTER_ADDR": first, "MASTER_PORT": _PORT, "OMP_NUM_THREADS": "1"}
    usual |= {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    started = [
        subprocess.Popen(
            [*prefix, sys.executable, *command],
            env={**os.environ, **usual, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
        for rank, prefix in enumerate(prefixes)
    ]
    try:
        ended = [one.communicate(timeout=timeout_s) for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    return [
        subprocess.CompletedProcess(one.args, one.returncode, out, err)
        for one, (out, err) in zip(started, ended, strict=True)
    ]


def _do(*commands: str) -> None:
    for one in commands:
        done = subprocess.run(one.split(), capture_output=True, text=True)
        assert done.returncode == 0, f"{one}: {done.stderr}"
