"""Clients of several ranks each: the ranks of a job are divided into one silo for each client.

```
client         0             1
ranks       0     1       2     3       0 and 2, the first ranks, take part in the rounds; 1 and 3 follow theirs
```
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from umbel.client.datacenter.ranks.group import Group, GroupError
from umbel.client.datacenter.ranks.names import CLIENTS, ranks_of_client

_CLIENTS, _RANKS = "clients", "ranks"  # the dimensions of the mesh


@dataclass(frozen=True, slots=True)
class ClientRanks:
    """Where this rank belongs. `first_ranks`: of all clients, in a group of their own; None if this rank follows."""

    number: int  # of its client
    n_clients: int
    own: Group  # of its client, on processors
    first_ranks: Group | None
    mesh: DeviceMesh  # its client's ranks, for the site's code


def divided(job: Group, n_each: int, timeout_s: float) -> ClientRanks:
    """Divide the ranks of the job into clients of `n_each`, next to each other. All ranks must make the call.

    `timeout_s`: how long a rank waits for the others in each call. Raises `GroupError` if the numbers do not fit.
    """
    if job.size % n_each:
        raise GroupError(
            f"{job.size} ranks cannot be divided into clients of {n_each} ranks each: start a multiple of {n_each} "
            "ranks (--nproc-per-node), or change --ranks-per-client"
        )
    n_clients = job.size // n_each
    first_ranks = job.among(range(0, job.size, n_each), "first_ranks", timeout_s, names=CLIENTS)
    own = list[Group | None]()
    for number in range(n_clients):
        names, ranks = ranks_of_client(number, n_clients), _ranks_of(number, n_each)
        own.append(job.among(ranks, f"client_{number}", timeout_s, names=names, on_processors=True))
    mesh = init_device_mesh(job.device.type, (n_clients, n_each), mesh_dim_names=(_CLIENTS, _RANKS))[_RANKS]
    return ClientRanks(job.rank // n_each, n_clients, next(one for one in own if one is not None), first_ranks, mesh)


def _ranks_of(client: int, n_each: int) -> Sequence[int]:
    return range(client * n_each, (client + 1) * n_each)
