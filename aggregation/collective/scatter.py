"""The mean of the ranks' float32 vectors, of which each rank gets its own part: a reduce-scatter in few bits.

Each rank rotates and rounds the part of every other rank by itself, as rotation blocks reach across a whole vector:

    rotate each part -> round it -> all-to-all -> mean -> rotate back

So a value is rounded once, and takes `bits` bits instead of 32. Without feedback the mean over random rotations is the
mean itself (`rounding.py`), so each step must have a key of its own.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from umbel.aggregation.collective.rounding import Rounding, whole_row
from umbel.aggregation.kernels.arguments import Blocks
from umbel.aggregation.kernels.kernels import rotate_into, unrotate_into


@dataclass(slots=True)
class ScatterMean:
    """Parts of means over a group. Every rank must ask for the same vectors in the same order. Raises `ValueError` for
    bits as `Rounding` does.
    """

    group: dist.ProcessGroup
    bits: int
    _rounding: Rounding = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._rounding = Rounding(self.bits)

    def mean_of_part(self, values: Tensor, key: int) -> Tensor:
        """This rank's part of the mean: float32 (P n,) -> float32 (n,), on the same device. Rank r has the r-th part.

        `key`: of the rotations, the same on all ranks.
        """
        n_ranks = dist.get_world_size(self.group)
        parts = values.view(n_ranks, -1)
        blocks = Blocks.of(parts.shape[1])
        rotated = values.new_zeros(n_ranks, whole_row(blocks.n_padded))
        for row, part in zip(rotated, parts, strict=True):
            rotate_into(row[: blocks.n_padded], part, blocks, key)
        n_used = torch.full((n_ranks,), blocks.n_padded, device=values.device)
        sent = self._rounding.rounded(rotated, n_used)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=self.group)
        mean = self._rounding.values(got).mean(0)
        out = values.new_empty(parts.shape[1])
        unrotate_into(out, mean[: blocks.n_padded].contiguous(), blocks, key)
        return out

    def sent_bytes(self, n_values: int) -> int:
        """How many bytes a rank gives to the network for vectors of `n_values` in all."""
        n_ranks = dist.get_world_size(self.group)
        blocks = Blocks.of(n_values // n_ranks)
        return (n_ranks - 1) * self._rounding.n_bytes(whole_row(blocks.n_padded))
