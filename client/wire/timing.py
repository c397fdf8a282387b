"""What one number, the round's window, makes of every other time. The few numbers beside it are the world's, not ours.

```
answer_s   window / 4                  2 s to 30 s   how long an answer may take; then its request is repeated
stall_s    window / 40                 3 s to 15 s   how long bytes may go unacknowledged, a connection take to be made
backoff    window / 1000, doubled up   to 0.1 s      the first wait between two tries
           to window / 50              to 10 s       the longest one: more than fifty tries fit
```

Where they end: TCP repeats a lost packet after 0.2 s, 0.6 s, 1.4 s and 3 s, and the start of a connection after 1 s and
3 s, so that less than 3 s would cut what is about to recover; 15 s is more than a handover between radio cells takes,
and 2 s what a coordinator on a busy disk may need for a flush. 30 s is the coordinator's own patience with a peer
(docs/reference/wire.md).
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


# An answer of which some came may go on coming, up to this many times its time.
_EXCHANGE_OVER_ANSWER = 2.0
# What large bodies may take in all: a GSM data call. Only a peer that means harm is slower and never stalls.
_SLOWEST_BYTES_PER_S = 1200.0


# What was sent is read again, hashed and checked before it is answered: on a slow disk, so fast.
_CHECKED_BYTES_PER_S = 20e6


def check_s(n_bytes: int) -> float:
    """How much longer than usual the answer to a whole model or update may take."""
    return n_bytes / _CHECKED_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds; see the module."""

    answer_s: float
    stall_s: float
    backoff: Backoff

    def exchange_s(self, large_bytes: int) -> float:
        """How long one exchange may take in all, with this much in its bodies."""
        return _EXCHANGE_OVER_ANSWER * self.answer_s + large_bytes / _SLOWEST_BYTES_PER_S


def within(window_s: float) -> Timing:
    """The times while a reporting window of this length is open."""
    return Timing(
        answer_s=min(max(window_s / 4, 2.0), 30.0),
        stall_s=min(max(window_s / 40, 3.0), 15.0),
        backoff=Backoff(first_s=min(window_s / 1000, 0.1), longest_s=min(window_s / 50, 10.0)),
    )


IDLE = Timing(answer_s=30.0, stall_s=15.0, backoff=IDLE_BACKOFF)
"""The times while there is no window: a client that waits for work."""
