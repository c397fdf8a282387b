"""What a function takes in a process of its own: what it returns, and the most memory that the process has held."""

import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Generic, TypeVar

Found = TypeVar("Found")

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class Measured(Generic[Found]):
    """`peak_bytes`: of resident memory, the interpreter's and torch's included."""

    found: Found
    peak_bytes: int


def in_child(function: Callable[..., Found], *arguments: object) -> Measured[Found]:
    """Call it in a fresh process. What it takes and returns must be picklable; what it raises is raised here."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measured, function, arguments).result()


def _measured(function: Callable[..., Found], arguments: tuple[object, ...]) -> Measured[Found]:
    return Measured(function(*arguments), peak_bytes())


def peak_bytes() -> int:
    """The most memory that this process has held. On Linux `getrusage` would tell the parent's, if that had more."""
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
