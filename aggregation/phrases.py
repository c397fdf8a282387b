"""Names and reasons listed in a sentence. Pure."""

from collections.abc import Sequence

_SHOWN = 5


def some(phrases: Sequence[str], shown: int = _SHOWN) -> str:
    """The first few, and how many more."""
    more = f" and {len(phrases) - shown} more" if len(phrases) > shown else ""
    return ", ".join(phrases[:shown]) + more
