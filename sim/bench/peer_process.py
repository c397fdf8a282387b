"""A peer's interpreter: the packages that it has, and its processes, which run in a folder of their own.

Every process that a peer starts carries the folder's name in its environment, by which it is found and ended: Ray's
processes and those of `torchrun` are in groups of their own.
"""

import contextlib
import json
import os
import subprocess
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path

import psutil

from umbel.sim.bench.report import BenchFailed

_MARK, _LOG = "UMBEL_PEER_FOLDER", "log"
_GRACE_S, _LOG_LINES = 10.0, 15
_RAY_ROOM = 40  # sockets in Ray's folder have names of some 65 characters, and may have 107 with it

_PROBE_S = 60.0
_PROBE = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def versions_of(python: Path, packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that the interpreter has. Raises `BenchFailed` if it cannot be run."""
    try:
        done = subprocess.run([str(python), "-c", _PROBE, *packages], capture_output=True, timeout=_PROBE_S, check=True)
        found: dict[str, str] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise BenchFailed(f"cannot ask {python} for its packages: {error}") from error
    return found


@contextlib.contextmanager
def started(command: Sequence[str], folder: Path) -> Generator["subprocess.Popen[bytes]"]:
    """A process in the folder, its output in a log there. At the end it, and all that runs in the folder, is killed."""
    with (folder / _LOG).open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(folder, Path(command[0]).parent),
            cwd=folder,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            left = _marked(folder)
            for one in left:
                with contextlib.suppress(psutil.Error):
                    one.kill()
            process.wait()
            psutil.wait_procs(left, _GRACE_S)  # they may still write into the folder


def _environment(folder: Path, programs: Path) -> dict[str, str]:
    """A user's environment with one thread a process, without GPU, telemetry, or settings of this interpreter.

    `programs`: the folder of the peer's programs, the first to be searched.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RAY_", "FLWR_"))}
    ours = {
        _MARK: str(folder),
        "PATH": f"{programs}{os.pathsep}{kept.get('PATH', '')}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PFL_PYTORCH_DEVICE": "cpu",
        "FLWR_HOME": str(folder),
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    if len(str(folder)) <= _RAY_ROOM:
        ours["RAY_TMPDIR"] = str(folder)
    return kept | ours


def _marked(folder: Path) -> list[psutil.Process]:
    found = list[psutil.Process]()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # of another user, or just ended
            if process.environ().get(_MARK) == str(folder):
                found.append(process)
    return found


def log_tail(folder: Path) -> str:
    """The last lines of the folder's log, to end a sentence; empty without any."""
    lines = (folder / _LOG).read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return "".join(["; the last lines of its log:", *(f"\n    {line}" for line in lines)]) if lines else ""
