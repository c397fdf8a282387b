"""The ranks of one client stay apart from those of the job's other clients.

The site's code can reach all ranks, because torch's default process group has them. Code that forgets to name its
client's ranks (`DistributedDataParallel(model)`) would mix all clients' gradients, and nothing would fail.
"""

from typing import Any

import torch.distributed as dist

from umbel.client.datacenter.ranks.group import Group, GroupError


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
                "different clients is mixed. Name the client's own ranks with the mesh that make_client(number, of, "
                "mesh) gets: DistributedDataParallel(model, process_group=mesh.get_group()), "
                "fully_shard(model, mesh=mesh)"
            )

    @property
    def _n_calls(self) -> int:
        # torch counts them to find ranks that have come out of step. It has no public name for the count.
        return 0 if self._job is None else int(self._job._get_sequence_number_for_group())
