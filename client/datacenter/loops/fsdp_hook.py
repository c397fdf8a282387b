"""A reduce-scatter for FSDP2 (`fully_shard`): each shard's mean gradient in few bits."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from umbel.aggregation.collective.scatter import ScatterMean
from umbel.aggregation.collective.torch_names import reduce_scatter_single
from umbel.aggregation.seeds import derive_seed


class FsdpHook:
    """The reduce-scatters of one model. `steps`: so far. `n_bytes`: of gradients, given to the network."""

    def __init__(self, bits: int, seed: int) -> None:
        self._bits, self._seed = bits, seed
        self.steps = self.n_bytes = 0

    def attach(self, model: nn.Module) -> None:
        for slot, module in enumerate(sharded_modules(model)):
            own: Any = _FewBits(self, self._bits, derive_seed(self._seed, "shards", slot))
            module.set_custom_reduce_scatter(own)


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules to which `fully_shard` was applied."""
    return [one for one in model.modules() if isinstance(one, FSDPModule)]


def detach(model: nn.Module) -> None:
    """Let torch's own reduce-scatters come back."""
    for module in sharded_modules(model):
        whole: Any = _Whole()
        module.set_custom_reduce_scatter(whole)


class _Whole:
    """As FSDP2 does it by itself. It has the methods of torch's `ReduceScatter`, which has no public name."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        return reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


class _FewBits(_Whole):
    """Of one module. Its gradients are averaged once in each step, in the same order on all ranks."""

    def __init__(self, hook: FsdpHook, bits: int, seed: int) -> None:
        self._hook, self._bits, self._seed = hook, bits, seed
        self._n_done = 0

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ValueError(
                "comm_hook takes means and sums of gradients, and set_gradient_divide_factor asks for another one: "
                "leave it out"
            )
        means = ScatterMean(group, self._bits)
        found = means.mean_of_part(input_tensor.to(torch.float32), derive_seed(self._seed, "step", self._n_done))
        self._n_done += 1
        self._hook.steps = max(self._hook.steps, self._n_done)
        self._hook.n_bytes += means.sent_bytes(input_tensor.numel())
        output_tensor.copy_(found if op == dist.ReduceOp.AVG else found * dist.get_world_size(group))
