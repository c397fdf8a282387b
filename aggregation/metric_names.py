"""What metrics may be called, and how many there may be: they go into logs, records and file names."""

import re

METRICS_MAX = 64
_NAME = re.compile(r"[A-Za-z0-9_./-]{1,64}")


def require_metric_name(name: str) -> None:
    """Raise `ValueError` for a name that no metric has."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"metric name {name[:80]!r} must be 1 to 64 letters, digits, '_', '.', '/' or '-'")
