"""How often a client has failed in the secure rounds of a run, kept on disk: a restart is no fresh start.

```
<coordinator>/failures/RUN.json   removed by a person who has looked, and by nothing else but success
```

A client that cannot do its part declines, and the coordinator sees that. What it declines for may hang on its data, so
a coordinator could ask until it has read something from the pattern of refusals. Therefore a client stops, until a
person has looked, after `FAILURES_MAX` failures in a row, and after `UNFIT_MAX` rounds of one run, in a row or not, in
which its training failed or ended early of itself, its update was not finite, or its steps could not be. What the
site's policy refuses does not count here: it says nothing of the data, and the next policy may allow it. A round for
which a budget of privacy has no room counts in the same way, for what is left of the budget is a secret, too.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.types import RunId
from umbel.client.errors import BudgetSpent, ClientError, StateError, TooManyFailures, UnfitWork, WorkRefused
from umbel.client.files import make_private, write_atomically

FAILURES_MAX = 3  # in a row, of which none is the line's: then a person should look
UNFIT_MAX = 3  # in a run: each of them tells the coordinator something of how training went
_LAST_CHARS_MAX = 500


@dataclass(frozen=True, slots=True)
class Failures:
    """`in_a_row`: since the last round that went as it should. `unfit`: of those of the run, how many tell something of
    the site's data or of its budgets. `last`: why the last one failed, in words.
    """

    in_a_row: int = 0
    unfit: int = 0
    last: str = ""

    def after(self, error: ClientError) -> "Failures":
        return Failures(self.in_a_row + 1, self.unfit + _tells(error), str(error)[:_LAST_CHARS_MAX])

    @property
    def words(self) -> str:
        """Empty as long as the client may go on."""
        if self.unfit >= UNFIT_MAX:
            return (
                f"in {self.unfit} rounds of this run its training failed or gave a result that must not be sent, or "
                "its budget of privacy had no room"
            )
        if self.in_a_row >= FAILURES_MAX:
            return f"it failed {self.in_a_row} times in a row in secure rounds of this run"
        return ""


_FAILURES = TypeAdapter(Failures)


class FailureStore:
    """Only for the holder of the state directory's lock."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def of(self, run: RunId) -> Failures:
        """Raises `StateError` for a damaged file."""
        path = self._path(run)
        try:
            return _FAILURES.validate_json(path.read_bytes())
        except FileNotFoundError:
            return Failures()
        except (ValidationError, OSError) as error:
            raise StateError(f"{path} is damaged; remove it and start again") from error

    def advice(self, run: RunId) -> str:
        """What a person must do before this client goes on in the run; empty as long as it may."""
        why = self.of(run).words
        return why and f"{why}. Look at its log for the cause, then remove {self._path(run)} and start it again"

    def check(self, run: RunId) -> None:
        """Raise `TooManyFailures` where a person must look first."""
        if advice := self.advice(run):
            last = self.of(run).last
            raise TooManyFailures(
                f"this client takes no further part in run {run!r}: {advice}. The last failure: {last}"
            )

    def count(self, run: RunId, error: ClientError) -> None:
        """Durably, before the coordinator is told."""
        if outlives_a_restart(error):
            make_private(self._root)
            write_atomically(self._path(run), _FAILURES.dump_json(self.of(run).after(error)))

    def succeeded(self, run: RunId) -> None:
        """A round went as it should: what failed before is no longer in a row. What was unfit still counts."""
        before = self.of(run)
        if before.in_a_row:
            write_atomically(self._path(run), _FAILURES.dump_json(replace(before, in_a_row=0)))

    def _path(self, run: RunId) -> Path:
        return self._root / f"{run}.json"


def outlives_a_restart(error: ClientError) -> bool:
    """Not what a policy refuses, but for want of privacy."""
    return _tells(error) or not isinstance(error, WorkRefused)


def _tells(error: ClientError) -> bool:
    """Whether a refusal for it tells the coordinator something that nobody is to know."""
    return isinstance(error, UnfitWork | BudgetSpent)
