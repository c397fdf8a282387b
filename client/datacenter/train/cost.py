"""What a sum costs: the time of its parts on one rank, and the bytes that its machine has sent."""

from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Literal, TypeAlias, get_args

_COUNTERS = Path("/proc/net/dev")  # of Linux
_SENT_COLUMN = 8
Part: TypeAlias = Literal["train_s", "wait_s", "sum_s", "apply_s"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, slots=True)
class AttemptCost:
    """Of one attempt, in seconds. `wait_s`: for the slowest rank. `sent_bytes`: by all network interfaces of this
    rank's machine, also for others; None where the system does not say.
    """

    train_s: float = 0.0  # and to encode
    wait_s: float = 0.0
    sum_s: float = 0.0
    apply_s: float = 0.0  # the server's step
    sent_bytes: int | None = None

    @property
    def total_s(self) -> float:
        return self.train_s + self.wait_s + self.sum_s + self.apply_s


class CostMeter:
    """Begins with an attempt. Each of its parts ends where `end` is called."""

    def __init__(self) -> None:
        self._last, self._sent = monotonic(), bytes_sent()
        self._took = dict[Part, float]()

    def end(self, part: Part) -> None:
        """End a part."""
        now = monotonic()
        self._took[part], self._last = now - self._last, now

    def ended(self) -> AttemptCost:
        """The cost of the whole attempt."""
        train_s, wait_s, sum_s, apply_s = (self._took.get(part, 0.0) for part in PARTS)
        now = bytes_sent()
        sent = None if now is None or self._sent is None else now - self._sent
        return AttemptCost(train_s, wait_s, sum_s, apply_s, sent)


def bytes_sent() -> int | None:
    """By all network interfaces since this machine was started; None where the system does not say."""
    try:
        lines = _COUNTERS.read_text().splitlines()[2:]
        return sum(int(line.partition(":")[2].split()[_SENT_COLUMN]) for line in lines)
    except (OSError, IndexError, ValueError):
        return None
