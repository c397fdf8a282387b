"""All times of the network, derived from the round's window and the measured bandwidth; and the back-off between tries.

```
answer_s   window / 4                  2 s to 30 s   how long an answer may take before its request is repeated
stall_s    window / 40                 3 s to 15 s   how long bytes may be unacknowledged, or a connection take to open
backoff    window / 1000, doubled up   to 0.1 s      the first wait between two tries
           to window / 50              to 10 s       the longest one: more than fifty tries fit
```

Why these bounds: TCP repeats a lost packet after 0.2 s, 0.6 s, 1.4 s and 3 s, and the start of a connection after 1 s
and 3 s, so a limit below 3 s would cut a connection that is about to recover. A handover between radio cells takes less
than 15 s. A coordinator on a busy disk may need 2 s for a flush, and waits 30 s for a peer (docs/reference/wire.md).

The back-off has full jitter, a uniform draw between zero and an exponential bound (M. Brooker, "Exponential Backoff And
Jitter", AWS Architecture Blog, 2015).
"""

from dataclasses import dataclass, replace

from umbel.aggregation.update.wire import CHUNK_BYTES_MIN

RETRY_AFTER_MAX_S = 86400.0  # a coordinator may send clients of a large fleet away for hours


@dataclass(frozen=True, slots=True)
class Backoff:
    """Bounds of waits between tries: `first_s`, doubled with every try, up to `longest_s`."""

    first_s: float = 0.1
    longest_s: float = 60.0

    def bound_s(self, failures: int) -> float:
        """The longest wait after `failures` failures in a row (1 for the first)."""
        doublings = min(failures - 1, 62)
        return min(self.first_s * 2.0**doublings, self.longest_s)

    def wait_s(self, failures: int, jitter: float, retry_after_s: float = 0.0) -> float:
        """The wait. `jitter`: uniform in [0, 1). `retry_after_s` is respected up to `RETRY_AFTER_MAX_S`."""
        return min(max(retry_after_s, 0.0), RETRY_AFTER_MAX_S) + jitter * self.bound_s(failures)


IDLE_BACKOFF = Backoff()
"""Without a window: a coordinator that was away for an hour is found again within a minute."""
CLOSED_BACKOFF = Backoff(longest_s=10.0)
"""After assignments that closed before any training had begun: the whole bound. A coordinator that closes every
assignment at once is asked ever less often. But a slow client that each round stops must soon come to the next one,
because a small run waits for it."""
DECLINED_BACKOFF = Backoff(first_s=1.0)
"""After attempts that a client declined: the whole bound, so that clients that declined together return together."""


_EXCHANGE_OVER_ANSWER = 2.0  # how many times an answer's time an exchange may take, if bytes keep coming
SLOWEST_BYTES_PER_S = 1200.0  # a GSM data call; only a hostile peer is slower and never stalls
_CHECKED_BYTES_PER_S = 20e6  # at which a coordinator with a slow disk checks a body before it answers


def check_s(n_bytes: int) -> float:
    """How much longer than usual the answer to a whole model or update may take."""
    return n_bytes / _CHECKED_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class Timing:
    answer_s: float
    stall_s: float
    backoff: Backoff

    def exchange_s(self, large_bytes: int) -> float:
        """How long one exchange may take in all, with this many bytes in its bodies."""
        return _EXCHANGE_OVER_ANSWER * self.answer_s + large_bytes / SLOWEST_BYTES_PER_S


def within(window_s: float) -> Timing:
    """The times while a reporting window of this length is open."""
    return Timing(
        answer_s=min(max(window_s / 4, 2.0), 30.0),
        stall_s=min(max(window_s / 40, 3.0), 15.0),
        backoff=Backoff(first_s=min(window_s / 1000, 0.1), longest_s=min(window_s / 50, 10.0)),
    )


IDLE = Timing(answer_s=30.0, stall_s=15.0, backoff=IDLE_BACKOFF)
"""The times without a window, while a client waits for work."""


UP_OVER_DOWN = 0.25  # until an upload was measured: uplinks are often slower (ADSL, cable, mobile)
SAFETY = 2.0
MEASURED_S_MIN = 1e-6  # the shortest transfer, because a clock may show zero
GROWTH = 1.5  # of an entropy-coded update from one round to the next
CHUNK_BYTES_MAX = 8 << 20  # half of what a coordinator accepts by default; one that accepts less says so


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """The last transfer each way, in bytes per second with round trips; None until measured."""

    down: float | None = None
    up: float | None = None
    update_bytes: int | None = None  # the length of the last update

    def after_download(self, n_bytes: int, seconds: float) -> "Bandwidth":
        return replace(self, down=n_bytes / max(seconds, MEASURED_S_MIN)) if n_bytes else self

    def after_upload(self, n_bytes: int, seconds: float) -> "Bandwidth":
        return replace(self, up=n_bytes / max(seconds, MEASURED_S_MIN), update_bytes=n_bytes) if n_bytes else self

    @property
    def expected_up(self) -> float | None:
        """The expected rate of an upload, in bytes per second."""
        return self.up or (self.down * UP_OVER_DOWN if self.down else None)

    def reserve_s(self, update_bytes_max: int, window_s: float) -> float:
        """Seconds before the window's end at which training must stop, so that the update still arrives.

        This is twice the expected upload, and a twentieth of the window (0.5 s to 10 s) for a retry; at most half the
        window. The expected update is half as long again as the last one, or the longest before there was one.
        """
        expected = update_bytes_max if self.update_bytes is None else GROWTH * self.update_bytes
        upload_s = SAFETY * min(expected, update_bytes_max) / self.expected_up if self.expected_up else 0.0
        return min(upload_s + retry_s(window_s), window_s / 2)


def retry_s(window_s: float) -> float:
    return min(max(window_s / 20, 0.5), 10.0)


def chunk_bytes(bytes_per_s: float, window_s: float) -> int:
    """The length of a chunk that takes a two-hundredth of the window, 0.25 s to 2 s: a cut costs one chunk."""
    chunk_s = min(max(window_s / 200, 0.25), 2.0)
    return int(min(max(bytes_per_s * chunk_s, CHUNK_BYTES_MIN), CHUNK_BYTES_MAX))
