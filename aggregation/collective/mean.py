"""The mean of the ranks' float32 vectors, whole: what every way of sending fewer bits is compared with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
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

    def kept(self, slot: int, n_values: int) -> dict[str, Tensor]:
        """What this rank keeps for the next vector of a slot, copied to the CPU; empty if it keeps nothing."""
        ...

    def restore(self, slot: int, n_values: int, kept: Mapping[str, Tensor], device: torch.device) -> None:
        """Keep this for the next vector of a slot. `device`: of the vectors. Raises `ValueError` if it does not fit."""
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

    def kept(self, slot: int, n_values: int) -> dict[str, Tensor]:
        return {}

    def restore(self, slot: int, n_values: int, kept: Mapping[str, Tensor], device: torch.device) -> None:
        require_nothing_kept(kept)


def require_nothing_kept(kept: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` if there is something that only error feedback could use."""
    if kept:
        raise ValueError("the state is of a codec with error feedback, and this codec has none: use the same codec")
