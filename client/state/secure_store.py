"""What a client remembers of secure rounds on disk: that it has spoken, never what it knows.

```
<coordinator>/secure/begun.json      the last attempt that keys were made for; those are in memory alone
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
SUMS_BYTES_MAX = 1 << 28  # of all runs: a coordinator that makes up names and sums must not fill the disk
SUMS_MAX = 100  # of one run; with cohorts of a thousand clients some 2 MB
_ADVICE = {
    "begun": "could begin an attempt twice: remove it once the round that is open now is over, then start again",
    "sums": "could help to show by two sums what one of them hides: remove it once this run has a newer model, then "
    "start again",
    "spent": "could spend its privacy twice: remove it once this run is over, then start again",
}


@dataclass(frozen=True, slots=True)
class Begun:
    """One attempt: its assignment, and the random bits (hex) that tell it from another of the same name."""

    assignment: AssignmentId
    attempt_id: str


@dataclass(frozen=True, slots=True)
class RememberedSum:
    """A sum of one attempt for which this client has sent its masked update, so that the update may be in it.

    `key`: drawn here, so that nobody else can name this entry; `attempt_id`: the coordinator's word. `model_sha256`: of
    the model that was trained. `cohort`: who was invited. `clients`: who is in the sum; empty until this client has
    signed that. `is_revealed`: it has revealed shares of it. `terms_sha256`: of what it was made under
    (`earlier_sums.py`).
    """

    key: str
    attempt_id: str
    round: int
    model_sha256: str
    cohort: tuple[str, ...]
    clients: tuple[str, ...] = ()
    is_revealed: bool = False
    terms_sha256: str = ""

    @property
    def revealed(self) -> RevealedSum:
        """What is kept of it for good."""
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
        """The attempt that was begun last."""
        return _read(self._root / "begun.json", _BEGUN, _ADVICE["begun"])

    def begin(self, attempt: Begun) -> None:
        """Durably, before a word is said in it."""
        make_private(self._root)
        write_atomically(self._root / "begun.json", _BEGUN.dump_json(attempt))

    def sums(self, run: RunId) -> tuple[RememberedSum, ...]:
        """Those of this run that are remembered, the oldest first."""
        return _read(self._sums_path(run), _SUMS, _ADVICE["sums"]) or ()

    def sums_of_all_runs(self) -> dict[RunId, tuple[RememberedSum, ...]]:
        """Those of every run with this coordinator, by its name."""
        runs = sorted(RunId(path.stem) for path in (self._root / "sums").glob("*.json"))
        return {run: self.sums(run) for run in runs}

    def revealed(self, run: RunId) -> list[RevealedSum]:
        """Every sum of this run that this client has ever revealed shares of."""
        return [*self._archive(run).read(), *(one.revealed for one in self.sums(run) if one.is_revealed)]

    def revealed_of_all_runs(self) -> dict[RunId, list[RevealedSum]]:
        """Those of every run with this coordinator, by its name. No run has an archive without its newest sums."""
        return {run: self.revealed(run) for run in self.sums_of_all_runs()}

    def require_room(self) -> None:
        """Raise `WorkRefused` if no more sums can be remembered: none may be forgotten, so this site takes part in no
        more of them.
        """
        files = [*(self._root / "sums").glob("*.json"), *(self._root / "revealed").glob("*.jsonl")]
        if (n_bytes := sum(path.stat().st_size for path in files)) > SUMS_BYTES_MAX:
            raise WorkRefused(
                f"the secure rounds that this client remembers in {self._root} take {n_bytes >> 20} MiB, more than the "
                f"{SUMS_BYTES_MAX >> 20} that are meant for them. Pin a member list in the policy if there is none; "
                "then remove the files of runs that are over, if no other run goes on from one of their models",
                public_reason="this site has no room to remember another sum",
            )

    def remember(self, run: RunId, one: RememberedSum) -> None:
        """Durably, in the place of the entry of the same key.

        Of more than `SUMS_MAX` the oldest is forgotten. One of which shares were revealed goes only where there is no
        other, and into the archive first: it is never forgotten.
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
        """What this run's private rounds have cost so far."""
        return replace(_read(self._spent_path(run), _SPENT, _ADVICE["spent"]) or Ledger(delta), delta=delta)

    def spent_beside(self, run: RunId, state_dir: Path, delta: float) -> Ledger:
        """What the private rounds of all other runs have cost, those with other coordinators of this state directory
        too.
        """
        paths = sorted(
            path for path in state_dir.glob(f"*/secure/{_SPENT_DIR}/*.json") if path != self._spent_path(run)
        )
        ledgers = (_read(path, _SPENT, _ADVICE["spent"]) for path in paths)
        return reduce(Ledger.plus, (one for one in ledgers if one is not None), Ledger(delta))

    def spend(self, run: RunId, ledger: Ledger) -> None:
        """Durably, before anything of a private round hangs on this site's data."""
        make_private(self._spent_path(run).parent)
        write_atomically(self._spent_path(run), _SPENT.dump_json(ledger))

    def _archive(self, run: RunId) -> RevealedSums:
        return RevealedSums(self._root / "revealed" / f"{run}.jsonl")

    def _spent_path(self, run: RunId) -> Path:
        return self._root / _SPENT_DIR / f"{run}.json"

    def _sums_path(self, run: RunId) -> Path:
        return self._root / "sums" / f"{run}.json"


def _newest(sums: tuple[RememberedSum, ...], n_most: int) -> list[RememberedSum]:
    """At most so many of them, in their order: the newest, those that were revealed before all others."""
    ranked = sorted(range(len(sums)), key=lambda place: (sums[place].is_revealed, place))
    return [sums[place] for place in sorted(ranked[-n_most:])]


def _read(path: Path, adapter: TypeAdapter[T], advice: str) -> T | None:
    """None where there is none. `advice`: what could happen without it, and what to do. Raises `StateError`."""
    try:
        return adapter.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValidationError, OSError) as error:
        raise StateError(f"{path} is damaged, and without it this client {advice}") from error
