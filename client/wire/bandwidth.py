"""The measured bandwidth to the coordinator, and the time to reserve for the upload at the window's end."""

from dataclasses import dataclass, replace

from umbel.aggregation.update.wire import CHUNK_BYTES_MIN

# Uplinks are often slower than downlinks (ADSL, cable, mobile): expect a quarter until an upload was measured.
UP_OVER_DOWN = 0.25
SAFETY = 2.0
MEASURED_S_MIN = 1e-6  # the shortest transfer, because a clock may show zero
GROWTH = 1.5  # of an entropy-coded update from one round to the next
# Half of what a coordinator accepts by default; one that accepts less says so.
CHUNK_BYTES_MAX = 8 << 20


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
