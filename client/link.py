"""How fast the way to the coordinator is, measured; and how long before the window's end training must stop for it."""

from dataclasses import dataclass, replace

# Uplinks are often slower than downlinks (ADSL, cable, mobile), so until an upload was measured, expect a quarter.
_UP_OVER_DOWN = 0.25
_SAFETY = 2.0
CHUNK_BYTES_MIN = 64 << 10
CHUNK_BYTES_MAX = 4 << 20


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes per second of the last transfer each way, round trips included; None until measured."""

    down: float | None = None
    up: float | None = None

    def after_download(self, n_bytes: int, seconds: float) -> "Link":
        return replace(self, down=n_bytes / max(seconds, 1e-6)) if n_bytes else self

    def after_upload(self, n_bytes: int, seconds: float) -> "Link":
        return replace(self, up=n_bytes / max(seconds, 1e-6)) if n_bytes else self

    @property
    def expected_up(self) -> float | None:
        """Bytes per second to expect of an upload."""
        return self.up or (self.down * _UP_OVER_DOWN if self.down else None)

    def reserve_s(self, update_bytes: int, window_s: float) -> float:
        """Seconds before the window's end at which training must stop, so that the update still arrives.

        Twice the expected upload, and a twentieth of the window (0.5 s to 10 s) for a retry; at most half the window.
        """
        upload_s = _SAFETY * update_bytes / self.expected_up if self.expected_up else 0.0
        return min(upload_s + min(max(window_s / 20, 0.5), 10.0), window_s / 2)

    def chunk_bytes(self, window_s: float) -> int:
        """Upload chunk that takes about a twentieth of the window: what one cut may cost."""
        speed = self.expected_up or 0.0
        return int(min(max(speed * window_s / 20, CHUNK_BYTES_MIN), CHUNK_BYTES_MAX))
