"""What a client remembers of secure rounds on disk: that it has spoken, never what it knows.

```
<coordinator>/secure/begun.json          the last attempt that keys were made for; those are in memory alone
<coordinator>/secure/revealed/RUN.json   the last round in which this client has revealed shares, and who was in its sum
<coordinator>/secure/spent/RUN.json      what the run's private rounds have cost this client, by order
```
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.privacy.accounting import Ledger
from umbel.aggregation.types import AssignmentId, RunId
from umbel.client.errors import StateError
from umbel.client.files import make_private, write_atomically

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Begun:
    """One attempt: its assignment, and the random bits (hex) that tell it from another of the same name."""

    assignment: AssignmentId
    attempt_id: str


@dataclass(frozen=True, slots=True)
class Revealed:
    """The greatest round in which shares were revealed; whom it had invited, and who was in its sum, by name."""

    round: int
    cohort: tuple[str, ...]
    clients: tuple[str, ...]


_BEGUN = TypeAdapter(Begun)
_REVEALED = TypeAdapter(Revealed)
_SPENT = TypeAdapter(Ledger)


class SecureStore:
    """Only for the holder of the state directory's lock."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def begun(self) -> Begun | None:
        """The attempt that was begun last."""
        return _read(self._root / "begun.json", _BEGUN)

    def begin(self, attempt: Begun) -> None:
        """Durably, before a word is said in it."""
        make_private(self._root)
        write_atomically(self._root / "begun.json", _BEGUN.dump_json(attempt))

    def revealed(self, run: RunId) -> Revealed | None:
        """The last round of this run in which shares were revealed."""
        return _read(self._path(run), _REVEALED)

    def reveal(self, run: RunId, revealed: Revealed) -> None:
        """Durably, before a share is sent. An earlier round, where the site lets it be made again, lowers nothing."""
        before = self.revealed(run)
        if before is None or before.round <= revealed.round:
            make_private(self._path(run).parent)
            write_atomically(self._path(run), _REVEALED.dump_json(revealed))

    def spent(self, run: RunId, delta: float) -> Ledger:
        """What this run's private rounds have cost so far."""
        return replace(_read(self._spent_path(run), _SPENT) or Ledger(delta), delta=delta)

    def spend(self, run: RunId, ledger: Ledger) -> None:
        """Durably, before a share is sent."""
        make_private(self._spent_path(run).parent)
        write_atomically(self._spent_path(run), _SPENT.dump_json(ledger))

    def _spent_path(self, run: RunId) -> Path:
        return self._root / "spent" / f"{run}.json"

    def _path(self, run: RunId) -> Path:
        return self._root / "revealed" / f"{run}.json"


def _read(path: Path, adapter: TypeAdapter[T]) -> T | None:
    try:
        return adapter.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValidationError, OSError) as error:
        raise StateError(
            f"{path} is damaged, and without it this client could reveal a round twice: remove it once the round that "
            "is open now is over, then start again"
        ) from error
