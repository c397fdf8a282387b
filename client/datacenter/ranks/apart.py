"""The ranks of one client stay apart from those of the job's other clients.

The site's code can reach all ranks, because torch's default process group has them. Code that forgets to name its
client's ranks (`DistributedDataParallel(model)`) would mix all clients' gradients, and nothing would fail. What the
model shows of its ranks is checked once it is made: a first step could wait without end for clients that do not train
in this round. Calls that the model does not show are counted.
"""

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from umbel.client.datacenter.ranks.group import Group, GroupError
from umbel.client.local.bare_names import bare_name

_NAME_THEM = (
    "Name the client's own ranks with the mesh that make_client(number, of, mesh) gets: "
    "DistributedDataParallel(model, process_group=mesh.get_group()), fully_shard(model, mesh=mesh)"
)


def require_apart(model: nn.Module, ranks: Group) -> None:
    """Raise `GroupError` for a model that adds up or is distributed over ranks of other clients. `ranks`: the
    client's. It reads what DDP, FSDP, tensor parallelism and `SyncBatchNorm` say, and makes no call to other ranks.
    """
    own, whose = dist.get_process_group_ranks(ranks.process_group), f"the model{ranks.names.suffix}"
    for what, used in _ranks_used(model, whose):
        if others := sorted({*used} - {*own}):
            raise GroupError(
                f"{what} over the ranks {_shown(used)} of the job, but this client has only {_shown(own)}, so its work "
                f"would be mixed with that of the clients that have {_shown(others)}. {_NAME_THEM}"
            )


def _ranks_used(model: nn.Module, whose: str) -> Iterator[tuple[str, list[int]]]:
    """What the parts of the model do over several ranks, and the numbers of these ranks in the job."""
    for name, module in model.named_modules():
        group: Any = getattr(module, "process_group", None)  # of DDP, FSDP1 and SyncBatchNorm
        if isinstance(module, nn.SyncBatchNorm):
            group = group or dist.group.WORLD
        if isinstance(group, dist.ProcessGroup):
            part = f"the part {bare_name(name)!r} of {whose}" if name else whose
            yield f"{part} adds up", dist.get_process_group_ranks(group)
    for name, tensor in model.named_parameters():
        if isinstance(tensor, DTensor):
            part = f"the parameter {bare_name(name)!r} of {whose}"
            yield f"{part} is distributed", tensor.device_mesh.mesh.flatten().tolist()


def _shown(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


class ApartFromJob:
    """Finds calls over all ranks of the job, from now on. It finds nothing if `ranks` are all of them."""

    def __init__(self, ranks: Group) -> None:
        job: Any = dist.group.WORLD
        self._job = job if job is not None and ranks.size < job.size() else None
        self._before = self._n_calls

    def require(self) -> None:
        """Raise `GroupError` if there was such a call."""
        if self._job is not None and self._n_calls != self._before:
            raise GroupError(
                f"this client's code has added up over all {self._job.size()} ranks of the job, so the work of "
                f"different clients is mixed. {_NAME_THEM}"
            )

    @property
    def _n_calls(self) -> int:
        # torch counts them to find ranks that have come out of step. It has no public name for the count.
        return 0 if self._job is None else int(self._job._get_sequence_number_for_group())
