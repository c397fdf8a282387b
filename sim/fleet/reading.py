"""Files from other programs, read with a limit; and the trace of a production run (`aggregation/run/trace.py`)."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.run.trace import Trace


def read_bytes(path: Path, n_max: int) -> bytes:
    """All of a file. Raises `ValueError` if it is longer, `OSError` if it cannot be read."""
    with path.open("rb") as file:
        data = file.read(n_max + 1)
    if len(data) > n_max:
        raise ValueError(f"it is longer than the {n_max} bytes that are allowed")
    return data


@contextmanager
def named_by(key: str, path: Path) -> Generator[None]:
    """Raise `ValueError` with the key of the experiment's file, and the path, where this cannot be read."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{key} names {path}, which cannot be read: {error.strerror or error}") from error


def first_finding(error: ValidationError) -> str:
    """The first thing that is wrong, with the place where it stands."""
    found = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part)[:60] for part in found["loc"])
    what = str(found["msg"]).removeprefix("Value error, ")
    return f"{place}: {what}" if place else what


TRACE_BYTES_MAX = 1 << 30
_TRACE = TypeAdapter(Trace)


class NotTrace(ValueError):
    """A file is not what a trace is; it says which file, and what is wrong."""


def recorded_trace(name: str, folder: Path) -> Trace:
    """The trace that `recorded` in an experiment's `[fleet]` names. `folder`: to which its path is relative.

    Raises `ValueError`, in a sentence, for one that cannot be read or is not what it should be.
    """
    with named_by("fleet.recorded", folder / name):
        return read_trace(folder / name)


def read_trace(path: Path) -> Trace:
    """The trace of a file. Raises `NotTrace`, and `OSError` if it cannot be read."""
    try:
        trace = _TRACE.validate_json(read_bytes(path, TRACE_BYTES_MAX), strict=True)
        _require_all_mentioned(trace)
    except ValidationError as error:
        raise NotTrace(f"{path} is not a trace: {first_finding(error)}") from error
    except ValueError as error:
        raise NotTrace(f"{path} is not a trace: {error}") from error
    return trace


def _require_all_mentioned(trace: Trace) -> None:
    """A fleet takes memory for each client, so a file must have a word of each. Raises `ValueError`."""
    n_mentioned = len(set[int]().union(*(attempt.mentioned for attempt in trace.attempts)))
    if n_mentioned < trace.clients:
        raise ValueError(
            f"clients is {trace.clients}, and {n_mentioned} of them are mentioned; a trace numbers those that it "
            "mentions, so there are as many"
        )
