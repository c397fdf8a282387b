"""Ids, and the bounds of what plans and reports may say, with the checks of them. It imports nothing of umbel."""

import re
from typing import Literal, NewType, TypeAlias

RunId = NewType("RunId", str)
ClientId = NewType("ClientId", str)
AssignmentId = NewType("AssignmentId", str)
MetricNames: TypeAlias = tuple[str, ...] | Literal["all"]
ALL: Literal["all"] = "all"  # every metric that clients have, whatever its name

SLUG = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
SHA256 = re.compile(r"[0-9a-f]{64}")
METRICS_MAX = 64  # a report may name
METRIC_ABS_MAX = 1e30  # times any sample count, over any cohort, it stays finite
SAMPLE_COUNT_MAX = 1 << 40
TARGET_MAX = 1 << 20
ROUNDS_MAX = 1_000_000
STEPS_MAX = 1 << 62
LOCAL_MAX = 1 << 31
RATE_MIN, RATE_MAX = 1e-12, 1e6
LINE_RATE_MIN, LINE_RATE_MAX = 1e-6, 1e15  # bytes per second
OVER_SELECTION_MAX = 10.0
WINDOW_MIN_S = 0.1
WINDOW_MAX_S = 366 * 86_400.0
SECONDS_MAX = 1e9
BYTES_MAX = 1 << 60
CHANGES_MAX = 8  # a client that is further behind fetches the whole model
COHORT_MAX = 1 << 16  # of one masked sum: beyond it two clients would have the same share of the dither
LEVEL_MAX = 32_766  # of a rotated value: it stays within int16
RESIDUE_BITS_MAX = 32  # of a level modulo 2^bits
NORM_MIN, NORM_MAX = 2.0**-60, 2.0**60  # of an update
_NUMBERED = "client-"
_METRIC_NAME = re.compile(r"[A-Za-z0-9_./-]{1,64}")


def client_name(number: int) -> ClientId:
    """The name of a simulated client, or of a rank. Names sort like their numbers, up to ten million."""
    return ClientId(f"{_NUMBERED}{number:07}")


def client_number(name: ClientId) -> int:
    """The inverse of `client_name`."""
    return int(name.removeprefix(_NUMBERED))


def require_slug(value: str, what: str) -> None:
    """Raise `ValueError` unless `value` needs no escaping in a URL, a file name and a log line."""
    if not SLUG.fullmatch(value):
        raise ValueError(
            f"{what} must be 1 to 63 of a-z, 0-9, '-', '_' and start with a letter or digit, not {value!r}"
        )


def require_sha256(value: str, what: str) -> None:
    """Raise `ValueError` unless `value` is a SHA-256 in the one spelling that file names and comparisons rely on."""
    if not SHA256.fullmatch(value):
        raise ValueError(f"{what} must be 64 lower-case hex digits")


def require_sample_count(value: int, what: str, least: int = 1) -> None:
    """Raise `ValueError` for a count that cannot be a weight."""
    if not least <= value <= SAMPLE_COUNT_MAX:
        raise ValueError(f"{what} must lie between {least} and 2^40, not {value}")


def require_within(value: float, what: str, least: float, most: float) -> None:
    """Raise `ValueError` for a number beyond its bounds; a NaN is beyond all."""
    if not least <= value <= most:
        bounds = " and ".join(f"{bound:g}" if isinstance(bound, float) else str(bound) for bound in (least, most))
        raise ValueError(f"{what} must lie between {bounds}, not {value!r:.40}")


def require_window(window_s: float) -> None:
    """Raise `ValueError` for a window that no round can have."""
    if not WINDOW_MIN_S <= window_s <= WINDOW_MAX_S:
        raise ValueError(
            f"window_s must lie between {WINDOW_MIN_S:g} and {WINDOW_MAX_S:.0f} (366 days), not {window_s!r:.40}"
        )


def require_metric_name(name: str) -> None:
    """Raise `ValueError` for a name that no metric may have: names go into logs, records and file names."""
    if not _METRIC_NAME.fullmatch(name):
        raise ValueError(f"metric name {name[:80]!r} must be 1 to 64 letters, digits, '_', '.', '/' or '-'")


def require_metric_names(names: MetricNames) -> None:
    """Raise `ValueError` for more than 64 names, one that stands twice, or one that no metric has. `ALL` passes."""
    if names == ALL:
        return
    if len(names) > METRICS_MAX or len(set(names)) < len(names):
        raise ValueError(f"name at most {METRICS_MAX} metrics, and each of them once")
    for name in names:
        require_metric_name(name)
