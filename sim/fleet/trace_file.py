"""The trace of a production run (`aggregation/trace.py`), read from its file."""

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.trace import Trace
from umbel.sim.fleet.reading import first_finding, read_bytes

BYTES_MAX = 1 << 30
_TRACE = TypeAdapter(Trace)


class NotTrace(ValueError):
    """A file is not what a trace is; it says which file, and what is wrong."""


def read_trace(path: Path) -> Trace:
    """The trace of a file. Raises `NotTrace`, and `OSError` if it cannot be read."""
    try:
        return _TRACE.validate_json(read_bytes(path, BYTES_MAX), strict=True)
    except ValidationError as error:
        raise NotTrace(f"{path} is not a trace: {first_finding(error)}") from error
    except ValueError as error:
        raise NotTrace(f"{path} is not a trace: {error}") from error
