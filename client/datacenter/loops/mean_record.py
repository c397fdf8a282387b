"""What a mean in a loop of one's own costs, and how well the ranks agree."""

from dataclasses import dataclass
from time import monotonic

import torch
from torch import Tensor


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
