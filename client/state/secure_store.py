"""What a client remembers of secure rounds on disk: which it took part in, but never a secret.

```
<coordinator>/secure/begun/RUN.json  the run's last attempt that keys were made for; the keys are only in memory
<coordinator>/secure/begun.json      the same of all runs, as versions of umbel before 28 November 2026 stored it
<coordinator>/secure/lock            held while a decision is made that depends on what other runs of the site do
<coordinator>/secure/sums/RUN.json   the newest hundred sums that an update of this client may be in (`earlier_sums.py`)
<coordinator>/secure/revealed/RUN.jsonl   the older ones that it has revealed shares of
<coordinator>/secure/spent/RUN.json  what the run's private rounds have cost this client, by order
```
"""

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from umbel.aggregation.canonical import later
from umbel.aggregation.privacy.accounting import Ledger
from umbel.aggregation.types import AssignmentId, RunId
from umbel.client.errors import StateError, WorkRefused
from umbel.client.files import JsonFile, flush, locked_file, make_private, sync

SUMS_BYTES_MAX = 1 << 28  # of all runs, so that a coordinator that invents names and sums cannot fill the disk
SUMS_MAX = 100  # of one run: some 2 MB with cohorts of a thousand clients
_IF_BEGUN_DAMAGED = (
    "wait until the round that is open now is over, then remove the file and start again. If it is removed earlier, "
    "this client could begin an attempt twice"
)
_IF_SUMS_DAMAGED = (
    "wait until this run has a newer model, then remove the file and start again. If it is removed earlier, this "
    "client could take part in two sums that together reveal one update"
)
_IF_REVEALED_DAMAGED = (
    "wait until this run is over and no other run continues from one of its models, then remove the file and start "
    "again. If it is removed earlier, this client could take part in two sums that together reveal one update"
)
_IF_SPENT_DAMAGED = (
    "wait until this run is over, then remove the file and start again. If it is removed earlier, this client could "
    "spend its privacy budget twice"
)


@dataclass(frozen=True, slots=True)
class Begun:
    """One attempt: its assignment, and its random id, which tells it from another of the same name."""

    assignment: AssignmentId
    attempt_id: str


@dataclass(frozen=True, slots=True)
class RevealedSum:
    """A sum that this client has revealed shares of."""

    attempt_id: str
    round: int
    model_sha256: str
    n_invited: int  # the clients that the attempt asked
    clients: tuple[str, ...]  # the clients of the sum
    terms_sha256: str  # see `earlier_sums.terms_sha256`; empty for sums that older versions of umbel stored
    has_updates: bool = later(True)  # False: of an evaluation, so that it has only metrics


@dataclass(frozen=True, slots=True)
class RememberedSum:
    """A sum that this client has sent a masked update for, so that the update may be in it."""

    key: str  # drawn here at random, so that nobody else can name this entry
    attempt_id: str  # chosen by the coordinator
    round: int
    model_sha256: str  # of the model that was trained
    cohort: tuple[str, ...]  # the invited clients
    clients: tuple[str, ...] = ()  # the clients of the sum; empty until this client has signed them
    is_revealed: bool = False  # whether this client has revealed shares of it
    terms_sha256: str = ""  # see `earlier_sums.terms_sha256`
    has_updates: bool = later(True)  # as in `RevealedSum`

    @property
    def revealed(self) -> RevealedSum:
        """The part of it that is kept for ever."""
        return RevealedSum(
            self.attempt_id,
            self.round,
            self.model_sha256,
            len(self.cohort),
            self.clients,
            self.terms_sha256,
            self.has_updates,
        )


_BEGUN = TypeAdapter(Begun)
_SUMS = TypeAdapter(tuple[RememberedSum, ...])
_SPENT = TypeAdapter(Ledger)


class RevealedSums:
    """Every sum of a run that this client has revealed shares of: a file from which nothing is ever removed.

    A forgotten sum could be requested again without one client, and subtracted. A line is added, durably, when a sum
    leaves the newest hundred:

    ```
    ["anna","bert","cora"]                                     a set of clients; the first one has number 0
    {"attempt":"5f…","round":61,"model":"2b…","invited":5,"terms":"9a…","clients":0}
    ```

    A sum of an evaluation has `"updates":false`, too.

    A last line without its line feed was cut off by a crash; its sum is still among the newest hundred, so the line is
    dropped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[RevealedSum]:
        """All sums, the oldest first. Raises `StateError` for a damaged file."""
        return self._parsed()[1]

    def add(self, one: RevealedSum) -> None:
        """Add a sum, durably."""
        cohorts, _, n_whole = self._parsed()
        entry: dict[str, object] = {
            "attempt": one.attempt_id,
            "round": one.round,
            "model": one.model_sha256,
            "invited": one.n_invited,
            "terms": one.terms_sha256,
        }
        if not one.has_updates:
            entry["updates"] = False
        lines = [] if one.clients in cohorts else [json.dumps(one.clients, separators=(",", ":"))]
        place = cohorts.index(one.clients) if one.clients in cohorts else len(cohorts)
        lines.append(json.dumps(entry | {"clients": place}, separators=(",", ":")))
        make_private(self._path.parent)
        with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.seek(n_whole)
            file.truncate()
            file.writelines(line.encode() + b"\n" for line in lines)
            flush(file)
        sync(self._path.parent)

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
            raise StateError(f"{self._path} is damaged; {_IF_REVEALED_DAMAGED}") from error
        return cohorts, sums, n_whole


def _parse_line(said: Any, cohorts: list[tuple[str, ...]], sums: list[RevealedSum]) -> None:
    """Parse a line into either list. Raises `ValueError`, `LookupError` or `TypeError` for a damaged one."""
    if isinstance(said, list):
        cohorts.append(tuple(map(str, said)))
    else:
        place, n_invited, round_ = (int(said[key]) for key in ("clients", "invited", "round"))
        if place < 0:
            raise ValueError("a set of clients cannot have a number below 0")
        attempt_id, model_sha256, terms_sha256 = str(said["attempt"]), str(said["model"]), str(said.get("terms", ""))
        has_updates = bool(said.get("updates", True))
        clients = cohorts[place]
        sums.append(RevealedSum(attempt_id, round_, model_sha256, n_invited, clients, terms_sha256, has_updates))


class SecureStore:
    """Only for the holder of the state directory's lock, or of a run's. Every run's process writes the files of its run
    only, and reads those of all runs.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._begun_by_any = JsonFile(root / "begun.json", _BEGUN, _IF_BEGUN_DAMAGED)

    @contextmanager
    def alone(self) -> Generator[None]:
        """Other runs of this site wait before they enter this block. So what is read of them here stays true until what
        depends on it is stored.
        """
        with locked_file(make_private(self._root) / "lock"):
            yield

    def begun(self, run: RunId) -> Begun | None:
        """The last attempt that this run, or any run under an older version of umbel, made keys for."""
        return self._begun(run).read() or self._begun_by_any.read()

    def begin(self, run: RunId, attempt: Begun) -> None:
        """Store the attempt, durably, before its first message."""
        self._begun(run).write(attempt)

    def sums(self, run: RunId) -> tuple[RememberedSum, ...]:
        """The newest sums of this run, the oldest first."""
        return self._sums_file(run).read() or ()

    def sums_of_all_runs(self) -> dict[RunId, tuple[RememberedSum, ...]]:
        """The newest sums of every run with this coordinator."""
        runs = sorted(RunId(path.stem) for path in (self._root / "sums").glob("*.json"))
        return {run: self.sums(run) for run in runs}

    def revealed(self, run: RunId) -> list[RevealedSum]:
        """Every sum of this run that this client has revealed shares of."""
        newest = self.sums(run)  # read first, because another process may move a sum from here into the archive
        return [*self._archive(run).read(), *(one.revealed for one in newest if one.is_revealed)]

    def revealed_of_all_runs(self) -> dict[RunId, list[RevealedSum]]:
        """The revealed sums of every run with this coordinator. A run with an archive also has newest sums."""
        return {run: self.revealed(run) for run in self.sums_of_all_runs()}

    def require_room(self) -> None:
        """Raise `WorkRefused` if there is no room for more sums. None may be forgotten, so the site must decline."""
        files = [*(self._root / "sums").glob("*.json"), *(self._root / "revealed").glob("*.jsonl")]
        if (n_bytes := sum(path.stat().st_size for path in files)) > SUMS_BYTES_MAX:
            raise WorkRefused(
                f"this client's records of secure rounds in {self._root} take {n_bytes >> 20} MiB, more than the "
                f"limit of {SUMS_BYTES_MAX >> 20} MiB for all runs together. Name a member list in the policy if there "
                "is none. Then remove the files of runs that are over, unless another run continues from one of "
                "their models",
                public_reason="this site has no room to remember another sum",
            )

    def remember(self, run: RunId, one: RememberedSum) -> None:
        """Store a sum, durably, in place of an entry with the same key.

        Beyond `SUMS_MAX` the oldest is forgotten. A revealed sum is never forgotten: it leaves only if there are no
        others, and goes to the archive first.
        """
        before = self.sums(run)
        if one.key in {other.key for other in before}:
            after = [one if other.key == one.key else other for other in before]
        else:
            newest = newest_sums(before, SUMS_MAX - 1)
            for old in before:
                if old.is_revealed and old not in newest:
                    self._archive(run).add(old.revealed)
            after = [*newest, one]
        self._sums_file(run).write(tuple(after))

    def spent(self, run: RunId, delta: float) -> Ledger:
        return replace(_spent_file(self._root, run).read() or Ledger(delta), delta=delta)

    def spent_beside(self, run: RunId, state_dir: Path, delta: float) -> Ledger:
        """The cost of the private rounds of all other runs, with all coordinators of this state directory."""
        own = _spent_file(self._root, run).path
        paths = sorted(path for path in state_dir.glob("*/secure/spent/*.json") if path != own)
        ledgers = (_spent_file(path.parents[1], RunId(path.stem)).read() for path in paths)
        return reduce(Ledger.plus, (one for one in ledgers if one is not None), Ledger(delta))

    def spend(self, run: RunId, ledger: Ledger) -> None:
        """Store the cost, durably, before anything of a private round depends on this site's data."""
        _spent_file(self._root, run).write(ledger)

    def _archive(self, run: RunId) -> RevealedSums:
        return RevealedSums(self._root / "revealed" / f"{run}.jsonl")

    def _begun(self, run: RunId) -> JsonFile[Begun]:
        return JsonFile(self._root / "begun" / f"{run}.json", _BEGUN, _IF_BEGUN_DAMAGED)

    def _sums_file(self, run: RunId) -> JsonFile[tuple[RememberedSum, ...]]:
        return JsonFile(self._root / "sums" / f"{run}.json", _SUMS, _IF_SUMS_DAMAGED)


def _spent_file(root: Path, run: RunId) -> JsonFile[Ledger]:
    return JsonFile(root / "spent" / f"{run}.json", _SPENT, _IF_SPENT_DAMAGED)


def newest_sums(sums: tuple[RememberedSum, ...], n_most: int = SUMS_MAX) -> list[RememberedSum]:
    """The newest `n_most` sums in their order; revealed ones take precedence over all others."""
    ranked = sorted(range(len(sums)), key=lambda place: (sums[place].is_revealed, place))
    return [sums[place] for place in sorted(ranked[-n_most:])]
