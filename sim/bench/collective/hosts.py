"""Hosts on one machine: network namespaces without names.

A namespace here belongs to a process that waits for the end of its standard input. So it is gone when this process is
gone, however that ends. All interfaces are made inside the namespaces: those of the machine are neither used nor
changed.

Each host has a host name and an /etc/hosts of its own, because Gloo asks for the address of its host's name.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from umbel.sim.bench.report import BenchFailed

_TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")
_NEW = ("unshare", "--net", "--uts", "--mount")
_INTO = ("--net", "--uts", "--mount")
_HOLD = 'mount --bind "$1" /etc/hosts && echo "$2" > /proc/sys/kernel/hostname && echo ready && exec cat'
_COMMAND_S = 60.0
_ANY_SHAPE = ("rate", "1mbit", "burst", "9kb", "limit", "9kb")


def why_not() -> str:
    """Why there can be no hosts here; empty if there can."""
    if sys.platform != "linux":
        return "only Linux has network namespaces"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} cannot be found (Debian: iproute2, util-linux, mount)"
    try:
        with hosts(1) as made:
            made[0].run("tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *_ANY_SHAPE)
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
        run(*self.prefix, *command)


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
    """Of a host: its last number is one more than the host's."""
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


def run(*command: str) -> None:
    """Run a command to its end. Raises `BenchFailed`."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMMAND_S)
    except subprocess.CalledProcessError as error:
        raise BenchFailed(f"{' '.join(command)!r} failed: {error.stderr.strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchFailed(f"{' '.join(command)!r} failed: {error}") from error
