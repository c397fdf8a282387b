"""Real links between namespaces: they have the rate and the delay that they should, and leave nothing behind.

Times are compared with lower bounds only, which no busy machine breaks.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.repository import ROOT
from tests.servers.waits import wait_until
from tests.sim.bench.collective.small_job import LIMIT_S, N_VALUES, SMALL, samples
from umbel.sim.bench.collective.bench import links_of
from umbel.sim.bench.collective.hosts import hosts, why_not
from umbel.sim.bench.collective.links import Link, with_rate, with_rate_and_delay
from umbel.sim.bench.collective.ranks import run_ranks
from umbel.sim.bench.collective.relay import why_no_relay
from umbel.sim.bench.report import BenchFailed

_WHY_NOT = why_not()
_WHY_NO_RELAY = why_no_relay()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)]
needs_relay = pytest.mark.skipif(bool(_WHY_NO_RELAY), reason=_WHY_NO_RELAY)

# The first answers two echoes, and then reads to the end; the second prints the seconds of both.
SERVER = """
import socket
with socket.create_server(("10.99.0.1", 5000)) as listening:
    print("ready", flush=True)
    peer, _ = listening.accept()
    for _ in range(2):
        peer.sendall(peer.recv(1))
    while peer.recv(1 << 16):
        pass
    peer.sendall(b"x")
"""
CLIENT = """
import socket, sys, time
with socket.create_connection(("10.99.0.1", 5000)) as peer:
    peer.sendall(b"a"); peer.recv(1)
    began = time.monotonic()
    peer.sendall(b"a"); peer.recv(1)
    echoed = time.monotonic()
    peer.sendall(bytes(int(sys.argv[1])))
    peer.shutdown(socket.SHUT_WR); peer.recv(1)
    print(echoed - began, time.monotonic() - echoed)
"""


def seconds(link: Link, n_bytes: int) -> tuple[float, float]:
    """Of an echo, and of so many bytes, from rank 1 to rank 0."""
    server = subprocess.Popen(
        [*link.prefix(0), sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    with server:
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == "ready\n"
            command = [*link.prefix(1), sys.executable, "-c", CLIENT, str(n_bytes)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)
        finally:
            server.kill()
    echo_s, bytes_s = map(float, done.stdout.split())
    return echo_s, bytes_s


OF_LINKS = {"switch", "port0", "port1", "tun0"}


def interfaces() -> set[str]:
    """Those of this machine that have a name of a link's."""
    return OF_LINKS & set(os.listdir("/sys/class/net"))


@contextmanager
def nothing_left() -> Generator[None]:
    """What is started inside is gone afterwards, and this machine has no interface of it at any time."""
    before, own = interfaces(), namespaces()
    yield
    assert interfaces() == before
    assert namespaces() <= own


def namespaces() -> set[str]:
    """In which this process and those that it started are."""
    me = psutil.Process()
    return {os.readlink(f"/proc/{one.pid}/ns/net") for one in (me, *me.children(recursive=True))}


def test_a_link_has_its_rate_both_ways() -> None:
    with nothing_left(), with_rate(2, 8.0) as link:
        assert len(namespaces()) == 4, "this one, two hosts, and the switch"
        _, bytes_s = seconds(link, 400_000)
    burst = 64_000  # passes at once
    assert bytes_s >= (400_000 - burst) / 1e6
    assert link.title == "8 Mbit/s"


@needs_relay
def test_a_relayed_link_has_its_rate_and_its_delay() -> None:
    with nothing_left(), with_rate_and_delay(2, 8.0, 60.0) as link:
        assert len(namespaces()) == 3
        echo_s, bytes_s = seconds(link, 400_000)
    assert echo_s >= 0.06
    assert bytes_s >= 0.4 + 0.06
    assert link.title == "8 Mbit/s, 60 ms round trip"


@pytest.mark.parametrize("round_trip_ms", [None, pytest.param(5.0, marks=[pytest.mark.nightly, needs_relay])])
def test_ranks_train_over_a_link_and_their_interface_counts_their_bytes(round_trip_ms: float | None) -> None:
    links, words = links_of(2, (200.0,), round_trip_ms)
    assert len(links) == (1 if round_trip_ms is None else 2)
    assert "network namespace" in words
    job = replace(SMALL, methods=("float32", "umbel-4bit"), blocks=1)
    with nothing_left(), links[-1] as link:
        answers = run_ranks(job, samples(), link, LIMIT_S)
    for one in answers:
        sent = {name: trained.sent_bytes for name, trained in one.trained.items()}
        assert 4 * N_VALUES < sent["float32"] < 1.3 * 4 * N_VALUES, "headers and acknowledgements are included"
        assert sent["umbel-4bit"] < sent["float32"] / 2


def test_a_host_has_a_name_of_its_own_that_leads_to_its_address() -> None:
    with nothing_left(), hosts(2) as made:
        asked = "import socket; print(socket.gethostname(), socket.gethostbyname(socket.gethostname()))"
        said = [
            subprocess.run([*one.prefix, sys.executable, "-c", asked], capture_output=True, text=True, check=True)
            for one in made
        ]
        assert [one.stdout for one in said] == ["umbel-0 10.99.0.1\n", "umbel-1 10.99.0.2\n"]


def test_a_command_that_fails_is_quoted_and_nothing_is_left() -> None:
    with nothing_left(), pytest.raises(BenchFailed, match=r"ip link set nosuch up' failed: .*nosuch"), hosts(1) as made:
        made[0].run("ip", "link", "set", "nosuch", "up")


HELD = """
import signal, time
from umbel.sim.bench.collective.links import with_rate
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
with with_rate(2, 100.0) as link:
    print(*(one.pid for one in link.hosts), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_hosts_are_gone_with_the_process_that_made_them(number: signal.Signals) -> None:
    with started("-c", HELD) as one:
        assert one.stdout is not None
        held = [Path(f"/proc/{pid}") for pid in one.stdout.readline().split()]
        assert len(held) == 2
        assert all(place.exists() for place in held)
        one.send_signal(number)
        wait_until("the end of the hosts", lambda: not any(place.exists() for place in held))


def test_the_benchmark_ends_its_ranks_when_it_is_interrupted() -> None:
    """By SIGTERM, which it takes as it takes a Ctrl-C."""
    with started("-m", "umbel", "bench", "collective", "--rates", "1") as bench:
        me = psutil.Process(bench.pid)
        wait_until("the ranks to start", lambda: sum(is_rank(one) for one in me.children(recursive=True)) == 2)
        children = me.children(recursive=True)
        bench.send_signal(signal.SIGTERM)
        said, _ = bench.communicate(timeout=LIMIT_S)
        assert bench.returncode == 130
        assert said.endswith("umbel: interrupted; all processes are stopped\n")
        wait_until("the end of all processes", lambda: not any(one.is_running() for one in children))


@contextmanager
def started(*arguments: str) -> Generator["subprocess.Popen[str]"]:
    """A Python of this repository; all that it says is in `stdout`."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def is_rank(process: psutil.Process) -> bool:
    try:
        return any("collective.rank" in word for word in process.cmdline())
    except psutil.Error:
        return False
