"""Patterns of run names: `*` stands for any characters, `?` for one."""

import re
from collections.abc import Collection
from fnmatch import fnmatchcase

_PATTERN = re.compile(r"[a-z0-9*?][a-z0-9*?_-]{0,62}")


def require_run_pattern(pattern: str, what: str) -> None:
    """Raise `ValueError` unless this is a run's name, or a pattern of some."""
    if not _PATTERN.fullmatch(pattern):
        raise ValueError(
            f"{what} must be a run's name, 1 to 63 of a-z, 0-9, '-', '_', or a pattern with '*' or '?', not {pattern!r}"
        )


def is_named_by(patterns: Collection[str], run: str) -> bool:
    """Whether any of the patterns names this run."""
    return any(fnmatchcase(run, pattern) for pattern in patterns)
