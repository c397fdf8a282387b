"""What a client remembers of secure rounds on disk: which it took part in, but never a secret.

```
<coordinator>/secure/begun.json      the last attempt that keys were made for; the keys are only in memory
<coordinator>/secure/sums/RUN.json   the newest hundred sums that an update of this client may be in (`earlier_sums.py`)
<coordinator>/secure/revealed/RUN.jsonl   the older ones of which it has revealed shares (`revealed_sums.py`)
<coordinator>/secure/spent/RUN.json  what the run's private rounds have cost this client, by order
```
"""

from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.privacy.accounting import Ledger
from umbel.aggregation.types import AssignmentId, RunId
from umbel.client.errors import StateError, WorkRefused
from umbel.client.files import make_private, write_atomically
from umbel.client.state.revealed_sums import RevealedSum, RevealedSums

T = TypeVar("T")
_SPENT_DIR = "spent"
SUMS_BYTES_MAX = 1 << 28  # of all runs, so that a coordinator that invents names and sums cannot fill the disk
SUMS_MAX = 100  # of one run: some 2 MB with cohorts of a thousand clients
_ADVICE = {
    "begun": "could begin an attempt twice: remove it once the round that is open now is over, then start again",
    "sums": "could help to show by two sums what one of them hides: remove it once this run has a newer model, then "
    "start again",
    "spent": "could spend its privacy twice: remove it once this run is over, then start again",
}


@dataclass(frozen=True, slots=True)
class Begun:
    """One attempt: its assignment, and its random id, which tells it from another of the same name."""

    assignment: AssignmentId
    attempt_id: str


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

    @property
    def revealed(self) -> RevealedSum:
        """The part of it that is kept for ever."""
        return RevealedSum(
            self.attempt_id, self.round, self.model_sha256, len(self.cohort), self.clients, self.terms_sha256
        )


_BEGUN = TypeAdapter(Begun)
_SUMS = TypeAdapter(tuple[RememberedSum, ...])
_SPENT = TypeAdapter(Ledger)


class SecureStore:
    """Only for the holder of the state directory's lock."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def begun(self) -> Begun | None:
        """The last attempt that was begun; None before the first."""
        return _read(self._root / "begun.json", _BEGUN, _ADVICE["begun"])

    def begin(self, attempt: Begun) -> None:
        """Store the attempt, durably, before its first message."""
        make_private(self._root)
        write_atomically(self._root / "begun.json", _BEGUN.dump_json(attempt))

    def sums(self, run: RunId) -> tuple[RememberedSum, ...]:
        """The newest sums of this run, the oldest first."""
        return _read(self._sums_path(run), _SUMS, _ADVICE["sums"]) or ()

    def sums_of_all_runs(self) -> dict[RunId, tuple[RememberedSum, ...]]:
        """The newest sums of every run with this coordinator."""
        runs = sorted(RunId(path.stem) for path in (self._root / "sums").glob("*.json"))
        return {run: self.sums(run) for run in runs}

    def revealed(self, run: RunId) -> list[RevealedSum]:
        """Every sum of this run that this client has revealed shares of."""
        return [*self._archive(run).read(), *(one.revealed for one in self.sums(run) if one.is_revealed)]

    def revealed_of_all_runs(self) -> dict[RunId, list[RevealedSum]]:
        """The revealed sums of every run with this coordinator. A run with an archive also has newest sums."""
        return {run: self.revealed(run) for run in self.sums_of_all_runs()}

    def require_room(self) -> None:
        """Raise `WorkRefused` if there is no room for more sums. None may be forgotten, so the site must decline."""
        files = [*(self._root / "sums").glob("*.json"), *(self._root / "revealed").glob("*.jsonl")]
        if (n_bytes := sum(path.stat().st_size for path in files)) > SUMS_BYTES_MAX:
            raise WorkRefused(
                f"the secure rounds that this client remembers in {self._root} take {n_bytes >> 20} MiB, more than the "
                f"{SUMS_BYTES_MAX >> 20} that are meant for them. Pin a member list in the policy if there is none; "
                "then remove the files of runs that are over, if no other run continues from one of their models",
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
            newest = _newest(before, SUMS_MAX - 1)
            for old in before:
                if old.is_revealed and old not in newest:
                    self._archive(run).add(old.revealed)
            after = [*newest, one]
        make_private(self._sums_path(run).parent)
        write_atomically(self._sums_path(run), _SUMS.dump_json(tuple(after)))

    def spent(self, run: RunId, delta: float) -> Ledger:
        """The cost of this run's private rounds so far."""
        return replace(_read(self._spent_path(run), _SPENT, _ADVICE["spent"]) or Ledger(delta), delta=delta)

    def spent_beside(self, run: RunId, state_dir: Path, delta: float) -> Ledger:
        """The cost of the private rounds of all other runs, with all coordinators of this state directory."""
        paths = sorted(
            path for path in state_dir.glob(f"*/secure/{_SPENT_DIR}/*.json") if path != self._spent_path(run)
        )
        ledgers = (_read(path, _SPENT, _ADVICE["spent"]) for path in paths)
        return reduce(Ledger.plus, (one for one in ledgers if one is not None), Ledger(delta))

    def spend(self, run: RunId, ledger: Ledger) -> None:
        """Store the cost, durably, before anything of a private round depends on this site's data."""
        make_private(self._spent_path(run).parent)
        write_atomically(self._spent_path(run), _SPENT.dump_json(ledger))

    def _archive(self, run: RunId) -> RevealedSums:
        return RevealedSums(self._root / "revealed" / f"{run}.jsonl")

    def _spent_path(self, run: RunId) -> Path:
        return self._root / _SPENT_DIR / f"{run}.json"

    def _sums_path(self, run: RunId) -> Path:
        return self._root / "sums" / f"{run}.json"


def _newest(sums: tuple[RememberedSum, ...], n_most: int) -> list[RememberedSum]:
    """The newest `n_most` sums in their order; revealed ones take precedence over all others."""
    ranked = sorted(range(len(sums)), key=lambda place: (sums[place].is_revealed, place))
    return [sums[place] for place in sorted(ranked[-n_most:])]


def _read(path: Path, adapter: TypeAdapter[T], advice: str) -> T | None:
    """Read a file; None if there is none. `advice`: the risk without it, and what to do. Raises `StateError`."""
    try:
        return adapter.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValidationError, OSError) as error:
        raise StateError(f"{path} is damaged, and without it this client {advice}") from error
