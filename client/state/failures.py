"""How often a client has failed in the secure rounds of a run, kept on disk over restarts.

```
<coordinator>/failures/RUN.json   removed by a person
```

The coordinator sees that a client declines, and the reason may depend on the client's data. So a coordinator that
repeats rounds could learn from the pattern of refusals. A client stops, until a person has looked, after `FAILURES_MAX`
failures in a row. It also stops after `UNFIT_MAX` rounds of a run, in a row or not, whose refusal may reveal something
of the data: training failed or ended early, the update was not finite, or the steps were inconsistent. A round that
exceeds a privacy budget counts too, because the rest of the budget is secret. Other refusals of the policy do not
count: they say nothing of the data.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from umbel.aggregation.types import RunId
from umbel.client.errors import BudgetSpent, ClientError, TooManyFailures, UnfitWork, WorkRefused
from umbel.client.files import JsonFile

FAILURES_MAX = 3  # in a row, without failures of the network
UNFIT_MAX = 3  # in a run: each tells the coordinator something about the training
_LAST_CHARS_MAX = 500


@dataclass(frozen=True, slots=True)
class Failures:
    in_a_row: int = 0  # since the last successful round
    unfit: int = 0  # all failures of the run that may reveal something of the site's data or budgets
    last: str = ""  # the last failure, in words

    def after(self, error: ClientError) -> "Failures":
        return Failures(self.in_a_row + 1, self.unfit + _may_reveal(error), str(error)[:_LAST_CHARS_MAX])

    @property
    def words(self) -> str:
        """Why the client must stop, in words; empty while it may continue."""
        if self.unfit >= UNFIT_MAX:
            return (
                f"in {self.unfit} rounds of this run, its training failed or gave a result that must not be sent, or "
                "its privacy budget did not allow the round"
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
        return self._file(run).read() or Failures()

    def advice(self, run: RunId) -> str:
        """What a person must do before this client continues in the run; empty while it may continue."""
        why = self.of(run).words
        advice = (
            f"Look in the client's log for the cause. Then remove {self._file(run).path} and start the client again"
        )
        return why and f"{why}. {advice}"

    def check(self, run: RunId) -> None:
        """Raise `TooManyFailures` if a person must look first."""
        if advice := self.advice(run):
            last = self.of(run).last
            raise TooManyFailures(
                f"this client takes no further part in run {run!r}: {advice}. The last failure: {last}"
            )

    def count(self, run: RunId, error: ClientError) -> None:
        """Count a failure, durably, before the coordinator is told."""
        if outlives_a_restart(error):
            self._file(run).write(self.of(run).after(error))

    def succeeded(self, run: RunId) -> None:
        """End the row of failures after a successful round. Unfit rounds still count."""
        before = self.of(run)
        if before.in_a_row:
            self._file(run).write(replace(before, in_a_row=0))

    def _file(self, run: RunId) -> JsonFile[Failures]:
        return JsonFile(self._root / f"{run}.json", _FAILURES)


def outlives_a_restart(error: ClientError) -> bool:
    """Whether the failure is stored: not if the policy refused, except for lack of budget."""
    return _may_reveal(error) or not isinstance(error, WorkRefused)


def _may_reveal(error: ClientError) -> bool:
    """Whether the refusal may reveal something of the data or the budgets."""
    return isinstance(error, UnfitWork | BudgetSpent)
