"""How long to wait before trying again: exponential, with full jitter, as a pure function.

Full jitter (a uniform draw between nothing and the exponential bound) spreads a crowd of clients that lost the same
coordinator at the same moment better than equal or decorrelated jitter, and needs fewer calls in all (M. Brooker,
"Exponential Backoff And Jitter", AWS Architecture Blog, 2015).
"""

from dataclasses import dataclass

# A coordinator that steers the pace of a large fleet sends clients away for hours; fleets breathe with the day.
RETRY_AFTER_MAX_S = 86400.0


@dataclass(frozen=True, slots=True)
class Backoff:
    """`first_s`: bound of the first wait; it doubles with every try up to `longest_s`."""

    first_s: float = 0.1
    longest_s: float = 60.0

    def bound_s(self, failures: int) -> float:
        """The longest wait after `failures` failures in a row (1 for the first)."""
        doublings = min(failures - 1, 62)
        return min(self.first_s * 2.0**doublings, self.longest_s)

    def wait_s(self, failures: int, jitter: float, retry_after_s: float = 0.0) -> float:
        """The wait itself. `jitter`: uniform in [0, 1). `retry_after_s` is honoured, up to `RETRY_AFTER_MAX_S`."""
        return min(max(retry_after_s, 0.0), RETRY_AFTER_MAX_S) + jitter * self.bound_s(failures)


IDLE_BACKOFF = Backoff()
"""Without a window, for ever: a coordinator that was away for an hour is found again within a minute."""
CLOSED_BACKOFF = Backoff(longest_s=10.0)
"""After assignments that were closed before they were done, each in full. One is nothing: enough others were faster. A
coordinator that closes whatever it gives is asked ever more seldom."""
DECLINED_BACKOFF = Backoff(first_s=1.0)
"""After attempts that a client has declined, each in full: those who declined one together come back together, so that
the next can be of all of them."""
