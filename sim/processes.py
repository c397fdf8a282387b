"""Child processes of the demo and the benchmarks, each with its own log. They end when their starter ends.

Each child leads its own process group: a Ctrl-C at the terminal reaches only the starter, which then stops the children
in order. A child writes its standard error to a log file.

`python -m umbel.sim.processes MODULE ARG...` runs a module that ends with its starter. The starter keeps the other end
of standard input and never writes to it; however it dies, SIGKILL included, the pipe closes. Then the process sends
itself SIGTERM, and exits after a few seconds if that had no effect.
"""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from umbel.aggregation.phrases import exit_words

STOP_GRACE_S = 5.0
LOG_TAIL_LINES = 15


class ChildDied(Exception):
    """A process ended unexpectedly; the message holds the tail of its log."""


@dataclass(slots=True)
class Child:
    """One process. `process.stdin` and `process.stdout` are text pipes; `log`: what it wrote to standard error."""

    name: str
    process: "subprocess.Popen[str]"
    log: Path
    _log_file: IO[bytes] = field(repr=False)

    @property
    def stdin(self) -> IO[str]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def stdout(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def require_alive(self, *, may_finish: bool = False) -> None:
        """Raise `ChildDied` if it has ended; with `may_finish`, unless its exit status is 0."""
        code = self.process.poll()
        if code is not None and not (may_finish and code == 0):
            raise ChildDied(
                f"{self.name} ended unexpectedly ({exit_words(code)}). The end of {self.log}:\n{self.log_tail()}"
            )

    def log_tail(self) -> str:
        """The last lines of its log."""
        self._log_file.flush()
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:]) or "    (the log is empty)"

    def kill(self) -> None:
        """SIGKILL, now, to its whole group."""
        _signal(self.process, signal.SIGKILL)
        self.process.wait()
        self._close()

    def ask_to_stop(self) -> None:
        if self.process.poll() is None:
            _signal(self.process, signal.SIGTERM)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ask it to stop, and kill it if it does not."""
        self.ask_to_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        self.kill()

    def _close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout, self._log_file):
            if pipe is not None:
                with contextlib.suppress(OSError):  # a pipe whose reader is gone may still hold unsent bytes
                    pipe.close()


def start(
    name: str,
    argv: Sequence[str],
    log: Path,
    *,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Start `python ARGV...` with its own process group, its standard error in `log`.

    `prefix`: a command that becomes the one that follows, such as `nsenter`; `environment`: further variables.
    """
    log_file = log.open("ab")
    process = subprocess.Popen(
        [*prefix, sys.executable, *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log_file,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        start_new_session=True,
    )
    return Child(name, process, log, log_file)


@dataclass(frozen=True, slots=True)
class CoordinatorProcess:
    """A running coordinator. `admin_key` is a secret of this run only."""

    child: Child
    url: str
    admin_key: str = field(repr=False)

    @property
    def pid(self) -> int:
        return self.child.process.pid


def start_coordinator(data: Path, timeout_s: float = 60.0, *, port: int = 0) -> CoordinatorProcess:
    """`umbel serve` on loopback, with SQLite and local files in `data`; waits for it. `port` 0: a free one."""
    data.mkdir(parents=True, exist_ok=True)
    endpoint, admin_key = data / "endpoint", data / "admin.key"
    endpoint.unlink(missing_ok=True)  # of a coordinator that was killed here
    argv = ["-m", "umbel.sim.processes", "umbel", "serve", "--data", str(data), "--port", str(port)]
    child = start("the coordinator", argv, data / "coordinator.log")
    try:
        wait_until(lambda: _has_text(endpoint) and _has_text(admin_key), [child], timeout_s, "the coordinator to start")
        return CoordinatorProcess(child, endpoint.read_text().strip(), admin_key.read_text().strip())
    except BaseException:
        child.kill()
        raise


def wait_until(
    is_so: Callable[[], bool], children: Sequence[Child], timeout_s: float, what: str, *, may_finish: bool = False
) -> None:
    """Return once `is_so()`. Raises `ChildDied` or `TimeoutError`, saying what was waited for.

    `may_finish`: whether children may end meanwhile, with status 0.
    """
    deadline = time.monotonic() + timeout_s
    while not is_so():
        for child in children:
            child.require_alive(may_finish=may_finish)
        if time.monotonic() > deadline:
            raise TimeoutError(f"gave up after waiting {timeout_s:.0f} s for {what}")
        time.sleep(0.02)


@contextlib.contextmanager
def stopping(children: list[Child]) -> Generator[list[Child]]:
    """At the end, stop every child in the list, the newest first."""
    try:
        yield children
    finally:
        for child in children:
            child.ask_to_stop()
        for child in reversed(children):
            child.stop()


def _has_text(path: Path) -> bool:
    return path.exists() and bool(path.read_text().strip())


def _signal(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


GRACE_S = 5.0


def when_the_starter_is_gone(act: Callable[[], None]) -> None:
    """Call `act` on a daemon thread at the end of standard input; then end this process if it still runs."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        act()
        time.sleep(GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="tether", daemon=True).start()


def kill_own_group() -> None:
    """End this process and those that it started, at once. Others are spared if it does not lead its group."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Run the module named by the first argument as `__main__`, tethered."""
    when_the_starter_is_gone(lambda: os.kill(os.getpid(), signal.SIGTERM))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
