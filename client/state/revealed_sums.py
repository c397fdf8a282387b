"""Every sum that this client has revealed shares of: one file for each run, from which nothing is ever removed.

A forgotten sum could be requested again without one client, and subtracted. A line is added to the file, durably, when
a sum leaves the newest hundred (`secure_store.py`):

```
["anna","bert","cora"]                                     a set of clients; the first one has number 0
{"attempt":"5f…","round":61,"model":"2b…","invited":5,"terms":"9a…","clients":0}
```

If the same sites take part each time, a sum takes some 220 bytes. A last line without its line feed was cut off by a
crash; its sum is still among the newest hundred, so the line is dropped.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umbel.client.errors import StateError
from umbel.client.files import make_private, sync_directory, write_all

_ADVICE = (
    "could help to show by two sums what one of them hides: remove it once this run is over, and no other continues "
    "from one of its models, then start again"
)


@dataclass(frozen=True, slots=True)
class RevealedSum:
    """A sum that this client has revealed shares of."""

    attempt_id: str
    round: int
    model_sha256: str
    n_invited: int  # the clients that the attempt asked
    clients: tuple[str, ...]  # the clients of the sum
    terms_sha256: str  # see `earlier_sums.terms_sha256`; empty for sums that older versions of umbel stored


class RevealedSums:
    """The file of one run. Only for the holder of the state directory's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[RevealedSum]:
        """All sums, the oldest first. Raises `StateError` for a damaged file."""
        return self._parsed()[1]

    def add(self, one: RevealedSum) -> None:
        """Add a sum, durably."""
        cohorts, _, n_whole = self._parsed()
        entry = {
            "attempt": one.attempt_id,
            "round": one.round,
            "model": one.model_sha256,
            "invited": one.n_invited,
            "terms": one.terms_sha256,
        }
        lines = [] if one.clients in cohorts else [json.dumps(one.clients, separators=(",", ":"))]
        place = cohorts.index(one.clients) if one.clients in cohorts else len(cohorts)
        lines.append(json.dumps(entry | {"clients": place}, separators=(",", ":")))
        make_private(self._path.parent)
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, n_whole)
            os.lseek(fd, n_whole, os.SEEK_SET)
            write_all(fd, [b"".join(line.encode() + b"\n" for line in lines)])
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_directory(self._path.parent)

    def _parsed(self) -> tuple[list[tuple[str, ...]], list[RevealedSum], int]:
        """The sets of clients, the sums, and the number of bytes in whole lines."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            data = b""
        cohorts, sums = list[tuple[str, ...]](), list[RevealedSum]()
        n_whole = data.rfind(b"\n") + 1
        try:
            for line in data[:n_whole].splitlines():
                _parse_line(json.loads(line), cohorts, sums)
        except (ValueError, LookupError, TypeError) as error:
            raise StateError(f"{self._path} is damaged, and without it this client {_ADVICE}") from error
        return cohorts, sums, n_whole


def _parse_line(said: Any, cohorts: list[tuple[str, ...]], sums: list[RevealedSum]) -> None:
    """Parse a line into either list. Raises `ValueError`, `LookupError` or `TypeError` for a damaged one."""
    if isinstance(said, list):
        cohorts.append(tuple(map(str, said)))
    else:
        place, n_invited, round_ = (int(said[key]) for key in ("clients", "invited", "round"))
        if place < 0:
            raise ValueError("no set of clients has a number below 0")
        attempt_id, model_sha256, terms_sha256 = str(said["attempt"]), str(said["model"]), str(said.get("terms", ""))
        sums.append(RevealedSum(attempt_id, round_, model_sha256, n_invited, cohorts[place], terms_sha256))
