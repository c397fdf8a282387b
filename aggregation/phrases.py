"""Names, reasons and numbers in a sentence. Pure."""

import math
import signal
from collections.abc import Sequence

_SHOWN = 5


def some(phrases: Sequence[str], shown: int = _SHOWN) -> str:
    """The first few, and how many more."""
    more = f" and {len(phrases) - shown} more" if len(phrases) > shown else ""
    return ", ".join(phrases[:shown]) + more


def counted(n: int, one: str, many: str = "") -> str:
    """How many of what: `1 client`, `2 clients`. `many`: where that is not `one` with an s, as in `2 clients wait`."""
    return f"{n} {agreeing(n, one, many or f'{one}s')}"


def part_of(n: int, total: int, noun: str, does: str, do: str) -> str:
    """How many of how many do what: `1 of 3 reports is in`, `2 of 3 reports are in`, `0 of 1 report is in`."""
    return f"{n} of {counted(total, noun)} {does if 1 in (n, total) else do}"


def lasting(seconds: float) -> str:
    """A time in words: `6.0 s`, `4 min 10 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{max(0.0, seconds):.1f} s"
    minutes, rest_s = divmod(math.ceil(seconds), 60)
    return f"{minutes} min {rest_s} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def exit_words(status: int) -> str:
    """How a process ended. `status`: as `subprocess` gives it, below 0 for a signal."""
    if status >= 0:
        return f"exit status {status}"
    is_named = -status in {one.value for one in signal.Signals}
    return f"killed by {signal.Signals(-status).name if is_named else f'signal {-status}'}"


def agreeing(n: int, one: str, many: str) -> str:
    """The word that goes with a number that stands elsewhere in the sentence."""
    return one if n == 1 else many
