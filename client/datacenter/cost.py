"""What a sum costs: the time of its parts on one rank, and the bytes that it or its machine has sent."""

from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

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


@dataclass(frozen=True, slots=True)
class MeanRecord:
    """One mean of the ranks' changes in `outer_sync`, as this rank has seen it.

    Times are those of the processor: on a GPU the work itself may end later.
    """

    step: int  # of the inner optimizer, after which the mean was applied
    fragment: int  # the part of the model, from 0
    sum_s: float  # to round, to send and to add up, while the loop may go on
    wait_s: float  # for which the loop waited for that
    apply_s: float  # the outer optimizer's step
    n_bytes: int  # given to the network by this rank
    update_norm: Tensor | None  # L2, of this rank's change: float32 (), on its device. None after a resumption
    update_cosine: Tensor | None  # of the angle between it and the mean, likewise; 0 for a change of zeros
    compute_share: float = 0.0  # of the time since the mean before: the share (0 to 1) that was the loop's own
    steps_per_s: float = 0.0  # of the inner optimizer, since the mean before

    def scalars(self) -> dict[str, float]:
        """The numbers by tag, as for a `SummaryWriter`. It waits for the device."""
        found = {
            "seconds/sum_s": self.sum_s,
            "seconds/wait_s": self.wait_s,
            "seconds/apply_s": self.apply_s,
            "bytes/n_bytes": float(self.n_bytes),
            "share/compute_share": self.compute_share,
            "steps/steps_per_s": self.steps_per_s,
        }
        if self.update_norm is not None and self.update_cosine is not None:
            found |= {"updates/update_norm": float(self.update_norm)}
            found |= {"updates/update_cosine": float(self.update_cosine)}
        return found


class LoopMeter:
    """Divides a loop's time, from one mean to the next, into its own and that of the means."""

    def __init__(self) -> None:
        self._since, self._steps, self._means_s = monotonic(), 0, 0.0

    def add(self, means_s: float) -> None:
        """Take note of seconds for which a mean has kept the loop."""
        self._means_s += means_s

    def ended(self, steps: int) -> tuple[float, float]:
        """The share (0 to 1) that was the loop's own, and its steps a second, since the last call. `steps`: so far."""
        now = monotonic()
        span_s = max(now - self._since, 1e-9)  # some clocks tick seldom
        share, rate = 1 - self._means_s / span_s, (steps - self._steps) / span_s
        self._since, self._steps, self._means_s = now, steps, 0.0
        return share, rate


def norm_and_cosine(change: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Of vectors on one device, which is not waited for: see `MeanRecord`."""
    norm, of_mean = torch.linalg.vector_norm(change), torch.linalg.vector_norm(mean)
    lengths = norm * of_mean
    return norm, torch.where(lengths > 0, torch.dot(change, mean) / lengths, 0.0)


def bytes_sent() -> int | None:
    """By all network interfaces since this machine was started; None where the system does not say."""
    try:
        lines = _COUNTERS.read_text().splitlines()[2:]
        return sum(int(line.partition(":")[2].split()[_SENT_COLUMN]) for line in lines)
    except (OSError, IndexError, ValueError):
        return None
