"""When devices are there, from a file: one stretch of time a line, as CSV or as JSON Lines; docs/reference/traces.md.

```
device,from_s,until_s            {"device": "ward-3", "from_s": 0, "until_s": 28800}
ward-3,0,28800                   {"device": "ward-3", "from_s": 79200, "until_s": 86400}
ward-3,79200,86400
```
"""

import json
import math
import re
from collections.abc import Iterator
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from umbel.aggregation.types import SECONDS_MAX
from umbel.sim.fleet.presence import Recorded

LINES_MAX = 20_000_000
LINE_BYTES_MAX = 1000
NAME_CHARS_MAX = 100
_HEAD = "device,from_s,until_s"
_KEYS = set(_HEAD.split(","))
_NUMBER = re.compile(r" *[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)? *")
_Stretch: TypeAlias = tuple[str, float, float]


class NotPresence(ValueError):
    """A file does not say when devices are there; it says which file and line, and what is wrong."""


def read_presence(path: Path, cycle_s: float | None = None) -> Recorded:
    """When each device of the file is there. They are numbered from 0 in the order in which the file first names them.

    `cycle_s`: after so long it begins anew; None: after the last stretch. Raises `NotPresence`, and `OSError` if the
    file cannot be read.
    """
    parse = {".csv": _from_csv, ".jsonl": _from_json}.get(path.suffix.lower())
    if parse is None:
        raise NotPresence(f"{path} must be called .csv or .jsonl, by what it holds")
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
    """Each line with its number, from 1; an empty one is nobody's. No line is read further than it may be long."""
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
        raise ValueError("device must be a name or a whole number")
    for value in (from_s, until_s):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError("from_s and until_s must be numbers")
    return str(device), float(min(from_s, SECONDS_MAX * 2)), float(min(until_s, SECONDS_MAX * 2))


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, unless a key is repeated: then nobody knows which is meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is repeated")
    return found


def _seconds(text: str) -> float:
    if not _NUMBER.fullmatch(text):  # Python's own reading takes 1_0, and digits of any alphabet
        raise ValueError(f"{text[:40]!r} is no number of seconds")
    return float(text)


def _checked(stretch: _Stretch) -> _Stretch:
    device, from_s, until_s = stretch
    if not 1 <= len(device) <= NAME_CHARS_MAX or not device.isprintable():
        raise ValueError(f"device must be 1 to {NAME_CHARS_MAX} printable characters")
    if not (math.isfinite(from_s) and 0 <= from_s < until_s <= SECONDS_MAX):
        raise ValueError(f"from_s must be at least 0, and until_s greater, up to {SECONDS_MAX:g}")
    return stretch


def _joined(path: Path, rows: list[tuple[int, float, float, int]], names: list[str], cycle_s: float | None) -> Recorded:
    """Checked against each other."""
    if not rows:
        raise NotPresence(f"{path} names no device")
    rows.sort()
    last_s = max(until_s for _, _, until_s, _ in rows)
    for before, after in pairwise(rows):
        if before[0] == after[0] and after[1] < before[2]:
            device, line, other = names[after[0]], max(before[3], after[3]), min(before[3], after[3])
            raise NotPresence(f"{path}, line {line}: device {device} is there already, by line {other}")
    if cycle_s is not None and last_s > cycle_s:
        line = next(number for _, _, until_s, number in rows if until_s > cycle_s)
        raise NotPresence(f"{path}, line {line}: it ends after the cycle of {cycle_s:g} s")
    devices, from_s, until_s, _ = (np.array(column) for column in zip(*rows, strict=True))
    return Recorded(len(names), cycle_s or last_s, devices.astype(np.int64), from_s, until_s)
