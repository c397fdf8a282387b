"""Files that fleets are made of, read with limits: traces, times of presence (docs/reference/traces.md), and phones.

A file of presence has one stretch of time a line, as CSV or as JSON Lines:

```
device,from_s,until_s            {"device": "ward-3", "from_s": 0, "until_s": 28800}
ward-3,0,28800                   {"device": "ward-3", "from_s": 79200, "until_s": 86400}
ward-3,79200,86400
```

A file of phones is JSON:

```json
{"e6899215-...": {"down_u": 7491.4, "down_sigma": 3369.3, "up_u": 4935.2, "up_sigma": 2767.3}, ...}
```

The numbers are kilobytes (1000 bytes) per second: mean and standard deviation of each phone's transfers both ways, as
FLASH published them (Yang et al. 2021, "Characterizing Impacts of Heterogeneity in Federated Learning upon Large-Scale
Smartphone Data").
"""

import json
import math
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from umbel.aggregation.run.trace import Trace
from umbel.aggregation.types import SECONDS_MAX
from umbel.sim.fleet.presence import Recorded


def read_bytes(path: Path, n_max: int) -> bytes:
    """All of a file. Raises `ValueError` if it is longer, `OSError` if it cannot be read."""
    with path.open("rb") as file:
        data = file.read(n_max + 1)
    if len(data) > n_max:
        raise ValueError(f"it is longer than the {n_max} bytes that are allowed")
    return data


@contextmanager
def named_by(key: str, path: Path) -> Generator[None]:
    """Turn an `OSError` inside into a `ValueError` that names the key of the experiment's file, and the path."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{key} names {path}, which cannot be read: {error.strerror or error}") from error


def first_finding(error: ValidationError) -> str:
    """The first error, with its place."""
    found = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part)[:60] for part in found["loc"])
    what = str(found["msg"]).removeprefix("Value error, ")
    return f"{place}: {what}" if place else what


TRACE_BYTES_MAX = 1 << 30
_TRACE = TypeAdapter(Trace)


class NotTrace(ValueError):
    """A file is not a trace; the message says which file, and what is wrong."""


def recorded_trace(name: str, folder: Path) -> Trace:
    """The trace that `recorded` in an experiment's `[fleet]` names, relative to `folder`.

    Raises `ValueError`, with a sentence, for one that cannot be read or is not valid.
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
    """Raise `ValueError` unless the file mentions every client, because a fleet takes memory for each."""
    n_mentioned = len(set[int]().union(*(attempt.mentioned for attempt in trace.attempts)))
    if n_mentioned < trace.clients:
        raise ValueError(
            f"`clients` is {trace.clients}, but the attempts mention only {n_mentioned} clients; set `clients` to "
            f"{n_mentioned}, because a trace numbers only clients that it mentions"
        )


LINES_MAX = 20_000_000
LINE_BYTES_MAX = 1000
NAME_CHARS_MAX = 100
_HEAD = "device,from_s,until_s"
_KEYS = set(_HEAD.split(","))
_NUMBER = re.compile(r" *[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)? *")
_Stretch: TypeAlias = tuple[str, float, float]


class NotPresence(ValueError):
    """A file is not a file of presence; the message says which file and line, and what is wrong."""


def read_presence(path: Path, cycle_s: float | None = None) -> Recorded:
    """When each device of the file is present. Devices are numbered from 0 in the order of their first lines.

    `cycle_s`: the file repeats after this time; None: after the last stretch. Raises `NotPresence` and `OSError`.
    """
    parse = {".csv": _from_csv, ".jsonl": _from_json}.get(path.suffix.lower())
    if parse is None:
        raise NotPresence(f"{path}: the name of a presence file must end in .csv or .jsonl")
    numbers: dict[str, int] = {}
    rows: list[tuple[int, float, float, int]] = []
    with path.open("rb") as file:
        for number, line in _lines(path, file):
            if number == 1 and parse is _from_csv:
                if line != _HEAD:
                    raise NotPresence(f"{path}, line 1: it must be {_HEAD!r}")
                continue
            try:
                device, from_s, until_s = _checked(parse(line))
            except ValueError as error:
                raise NotPresence(f"{path}, line {number}: {error}") from error
            rows.append((numbers.setdefault(device, len(numbers)), from_s, until_s, number))
    return _joined(path, rows, list(numbers), cycle_s)


def _lines(path: Path, file: BufferedReader) -> Iterator[tuple[int, str]]:
    """Each line that is not empty, with its number, from 1. No line is read beyond its greatest length."""
    number = 0
    while data := file.readline(LINE_BYTES_MAX + 1):
        number += 1
        if number > LINES_MAX:
            raise NotPresence(f"{path} has more than the {LINES_MAX} lines that are allowed")
        if len(data) > LINE_BYTES_MAX:
            raise NotPresence(f"{path}, line {number}: it is longer than {LINE_BYTES_MAX} bytes")
        try:
            line = data.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise NotPresence(f"{path}, line {number}: it is not UTF-8") from error
        if line:
            yield number, line


def _from_csv(line: str) -> _Stretch:
    cells = line.split(",")
    if len(cells) != 3:
        raise ValueError(f"it has {len(cells)} cells, not the three of {_HEAD!r}")
    return cells[0], _seconds(cells[1]), _seconds(cells[2])


def _from_json(line: str) -> _Stretch:
    try:
        found: Any = json.loads(line, object_pairs_hook=_unrepeated)
    except (ValueError, RecursionError) as error:
        raise ValueError("it is not JSON, or a key is repeated in it") from error
    if not isinstance(found, dict) or set(found) != _KEYS:
        raise ValueError(f"it must be an object with the keys {_HEAD.replace(',', ', ')}")
    device, from_s, until_s = found["device"], found["from_s"], found["until_s"]
    if isinstance(device, bool) or not isinstance(device, str | int):
        raise ValueError("`device` must be a name or a whole number")
    for value in (from_s, until_s):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError("from_s and until_s must be numbers")
    return str(device), float(min(from_s, SECONDS_MAX * 2)), float(min(until_s, SECONDS_MAX * 2))


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Raises `ValueError` if a key is repeated."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is repeated")
    return found


def _seconds(text: str) -> float:
    if not _NUMBER.fullmatch(text):  # Python itself also reads 1_0, and digits of any alphabet
        raise ValueError(f"{text[:40]!r} is not a number of seconds")
    return float(text)


def _checked(stretch: _Stretch) -> _Stretch:
    device, from_s, until_s = stretch
    if not 1 <= len(device) <= NAME_CHARS_MAX or not device.isprintable():
        raise ValueError(f"`device` must be 1 to {NAME_CHARS_MAX} printable characters")
    if not (math.isfinite(from_s) and 0 <= from_s < until_s <= SECONDS_MAX):
        raise ValueError(
            f"from_s must be at least 0, and until_s must be greater than from_s, and at most {SECONDS_MAX:g}"
        )
    return stretch


def _joined(path: Path, rows: list[tuple[int, float, float, int]], names: list[str], cycle_s: float | None) -> Recorded:
    """Check the stretches against each other."""
    if not rows:
        raise NotPresence(f"{path} names no device")
    rows.sort()
    last_s = max(until_s for _, _, until_s, _ in rows)
    for before, after in pairwise(rows):
        if before[0] == after[0] and after[1] < before[2]:
            device, line, other = names[after[0]], max(before[3], after[3]), min(before[3], after[3])
            raise NotPresence(
                f"{path}, line {line}: the time of device {device} overlaps with its time in line {other}; join "
                "the two lines, or correct one"
            )
    if cycle_s is not None and last_s > cycle_s:
        line = next(number for _, _, until_s, number in rows if until_s > cycle_s)
        raise NotPresence(f"{path}, line {line}: until_s is after the end of the cycle of {cycle_s:g} s")
    devices, from_s, until_s, _ = (np.array(column) for column in zip(*rows, strict=True))
    return Recorded(len(names), cycle_s or last_s, devices.astype(np.int64), from_s, until_s)


PHONES_BYTES_MAX = 1 << 24
_RATE_MAX = 1e9
_Rate = Annotated[float, Field(gt=0, le=_RATE_MAX)]
_Deviation = Annotated[float, Field(ge=0, le=_RATE_MAX)]


class NotPhones(ValueError):
    """A file is not a file of phones; the message says which file, and what is wrong."""


@dataclass(frozen=True, slots=True)
class Phone:
    """The transfers of one phone, in kB/s."""

    down_u: _Rate
    down_sigma: _Deviation
    up_u: _Rate
    up_sigma: _Deviation
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - refuse what would be ignored


_PHONES = TypeAdapter(Annotated[dict[str, Phone], Field(min_length=1, max_length=100_000)])


def read_phones(path: Path) -> tuple[Phone, ...]:
    """The phones of a file, in its order. Raises `NotPhones`, and `OSError` if it cannot be read."""
    try:
        return tuple(_PHONES.validate_json(read_bytes(path, PHONES_BYTES_MAX)).values())
    except ValidationError as error:
        raise NotPhones(f"{path} is not a file of phones: {first_finding(error)}") from error
    except ValueError as error:
        raise NotPhones(f"{path} is not a file of phones: {error}") from error
