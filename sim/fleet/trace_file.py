"""The trace of a production run (`aggregation/run/trace.py`), read from its file."""

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.run.trace import Trace
from umbel.sim.fleet.reading import first_finding, named_by, read_bytes

BYTES_MAX = 1 << 30
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
        trace = _TRACE.validate_json(read_bytes(path, BYTES_MAX), strict=True)
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
