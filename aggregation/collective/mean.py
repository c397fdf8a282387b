"""The mean of the ranks' float32 vectors, whole: what every way of sending fewer bits is compared with."""

from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class Mean(Protocol):
    """A way to the mean of the ranks' vectors. Every rank must ask for the same vectors in the same order."""

    @property
    def feedback(self) -> bool:
        """Whether all steps must have one key."""
        ...

    def mean(self, values: Tensor, key: int, slot: int = 0) -> Tensor:
        """The mean of all ranks' `values`: float32 (n,), on their device, the same bits on every rank.

        `key`: of what is drawn at random, the same on all ranks. `slot`: which vector it is.
        """
        ...

    def sent_bytes(self, n_values: int) -> int:
        """How many bytes a rank gives to the network for a vector."""
        ...


@dataclass(frozen=True, slots=True)
class Float32Mean:
    """By an all-reduce of float32. The same bits on every rank; which bits depends on the backend and on its ring."""

    group: dist.ProcessGroup
    feedback: bool = False

    def mean(self, values: Tensor, key: int, slot: int = 0) -> Tensor:
        out = values.clone()
        dist.all_reduce(out, group=self.group)
        return out.div_(dist.get_world_size(self.group))

    def sent_bytes(self, n_values: int) -> int:
        n_ranks = dist.get_world_size(self.group)
        return 2 * 4 * n_values * (n_ranks - 1) // n_ranks
