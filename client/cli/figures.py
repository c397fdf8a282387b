"""Numbers and times for people: alike wherever a command prints them."""

from collections.abc import Mapping
from datetime import UTC, datetime

from umbel.client.printable import printable


def figure(value: float) -> str:
    """Four digits, also where the last are zeros, so that figures in a column can be compared."""
    return f"{value:#.4g}".rstrip(".")


def figures(means: Mapping[str, float]) -> str:
    """Each with its name, in the order of the names."""
    return "  ".join(f"{printable(name)} {figure(value)}" for name, value in sorted(means.items()))


def moment(unix_s: float) -> str:
    """Date and time, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%MZ")


def time_of_day(unix_s: float) -> str:
    """The time alone, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%H:%MZ")
