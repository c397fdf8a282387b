"""The mean of the ranks' float32 vectors by an exchange of few bits, whatever the number of ranks.

Each rank is responsible for a part of the positions. It gets that part of every rank's vector, takes the mean, and
sends it to all:

    rotate -> round each rank's part -> all-to-all -> mean of my part -> round it -> all-gather -> rotate back

So a value takes `bits` bits on its way there and `bits` back, instead of 32 each, and it is rounded twice. (An
all-reduce of levels is rounded once, but its lanes need room for the sum, which is too much for few bits.) ZeRO++'s
gradients (Wang et al. 2023) and torchft's float8 sums go the same way.

How a vector becomes few bits is in `rounding.py`. Without feedback each step must have a key of its own, as the mean
over random rotations is the vector itself. The second rounding is in the rotation of the first, which leaves a bias:
1 % of the mean at 4 bits, and 13 % at 2 bits, which are refused. With feedback what was not sent is added to the next
vector: by each rank what it has left of its own, and by the one responsible what it has left of the mean. Then all
steps must have the same key.

Nothing is read back from a device, and every rank decodes the same bytes, so all get the same bits. A vector with a
value that is not finite makes its part, and so blocks of the mean, NaN on every rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from umbel.aggregation.collective.mean import require_nothing_kept
from umbel.aggregation.collective.rounding import Rounding, whole_row
from umbel.aggregation.collective.torch_names import all_gather_single
from umbel.aggregation.kernels.arguments import Blocks
from umbel.aggregation.kernels.kernels import rotate_into, unrotate_into


@dataclass(slots=True)
class Left:
    """What error feedback keeps for one vector: of this rank's own, and of the mean of its part (rotated)."""

    own: Tensor
    of_part: Tensor


@dataclass(slots=True)
class ExchangeMean:
    """Means over a group. Every rank must ask for the same vectors in the same order.

    `feedback`: whether what rounding leaves out is added to the next vector of the same slot.
    """

    group: dist.ProcessGroup
    bits: int
    feedback: bool = False
    left: dict[tuple[int, int], Left] = field(default_factory=dict[tuple[int, int], Left], repr=False)
    _rounding: Rounding = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._rounding = Rounding(self.bits, self.feedback)

    def mean(self, values: Tensor, key: int, slot: int = 0) -> Tensor:
        """The mean of all ranks' `values`: float32 (n,), on their device, the same bits on every rank.

        `key`: of the rotation, the same on all ranks. `slot`: which vector it is, for error feedback; a slot whose
        length has changed begins anew.
        """
        n_ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        blocks = Blocks.of(values.numel())
        n_part = _part_length(blocks, n_ranks)
        left = self.left.get((slot, values.numel())) if self.feedback else None
        whole = values if left is None else values + left.own
        rotated = values.new_zeros(n_ranks * n_part)
        rotate_into(rotated[: blocks.n_padded], whole, blocks, key)
        parts = rotated.view(n_ranks, n_part)
        firsts = torch.arange(0, n_ranks * n_part, n_part, device=values.device)
        n_used = (blocks.n_padded - firsts).clamp_(0, n_part)  # the rest is no part of the rotated vector
        sent = self._rounding.rounded(parts, n_used)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=self.group)
        part = self._rounding.values(got).mean(0)
        if left is not None:
            part += left.of_part
        part[max(0, blocks.n_padded - rank * n_part) :].zero_()
        made = self._rounding.rounded(part.unsqueeze(0), n_used[rank : rank + 1])
        gathered = made.new_empty(n_ranks * made.numel())
        all_gather_single(gathered, made.view(-1), group=self.group)
        means = self._rounding.values(gathered.view(n_ranks, -1))
        if self.feedback:
            own = torch.empty_like(values)
            unrotate_into(own, self._rounding.values(sent).reshape(-1)[: blocks.n_padded].contiguous(), blocks, key)
            self.left[slot, values.numel()] = Left(whole - own, part - means[rank])
        out = torch.empty_like(values)
        unrotate_into(out, means.reshape(-1)[: blocks.n_padded].contiguous(), blocks, key)
        return out

    def sent_bytes(self, n_values: int) -> int:
        """How many bytes a rank gives to the network for a vector."""
        n_ranks = dist.get_world_size(self.group)
        n_part = _part_length(Blocks.of(n_values), n_ranks)
        return 2 * (n_ranks - 1) * self._rounding.n_bytes(n_part)

    def kept(self, slot: int, n_values: int) -> dict[str, Tensor]:
        """What feedback keeps for the next vector of a slot, copied to the CPU; empty if it keeps nothing."""
        if (left := self.left.get((slot, n_values))) is None:
            return {}
        return {"own": left.own.to("cpu", copy=True), "of_part": left.of_part.to("cpu", copy=True)}

    def restore(self, slot: int, n_values: int, kept: Mapping[str, Tensor], device: torch.device) -> None:
        """Keep this for the next vector of a slot. `device`: of the vectors. Raises `ValueError` if it does not fit."""
        self.left.pop((slot, n_values), None)
        if not kept:
            return
        if not self.feedback:
            require_nothing_kept(kept)
        n_ranks = dist.get_world_size(self.group)
        lengths = {"own": n_values, "of_part": _part_length(Blocks.of(n_values), n_ranks)}
        if {name: one.numel() for name, one in kept.items()} != lengths:
            raise ValueError(
                f"what error feedback has kept is of another model or of another number of ranks than {n_ranks}: start "
                "as many ranks as before, or begin without this state"
            )
        self.left[slot, n_values] = Left(kept["own"].to(device, copy=True), kept["of_part"].to(device, copy=True))


def _part_length(blocks: Blocks, n_ranks: int) -> int:
    """The positions of each rank: whole groups of packed values."""
    return whole_row(-(-blocks.n_padded // n_ranks))
