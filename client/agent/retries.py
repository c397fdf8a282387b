"""When a run whose process has failed is tried again: after a pause that grows. What went wrong is said once."""

from dataclasses import dataclass, replace

from umbel.client.wire.timing import Backoff

RETRY = Backoff(first_s=2.0, longest_s=600.0)
_WELL_S = 600.0  # a process that has lived so long before it failed had no trouble at its start


@dataclass(frozen=True, slots=True)
class Failing:
    """The failures of one run's processes in a row. Times are on the monotonic clock."""

    count: int = 0
    last: str = ""
    retry_at: float = float("-inf")

    def after(self, reason: str, now: float, lived_s: float, reports: int) -> "Failing":
        """With one more failure. A process that has reported, or lived for long, starts a new row."""
        count = 1 if reports or lived_s >= _WELL_S else self.count + 1
        return Failing(count, reason, now + RETRY.bound_s(count))

    def now(self) -> "Failing":
        """The same, to be tried again at once."""
        return replace(self, retry_at=float("-inf"))
