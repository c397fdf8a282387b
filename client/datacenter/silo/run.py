"""Take part in a run as one client of several ranks. Only rank 0 speaks to the coordinator."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from umbel.client.app import Client
from umbel.client.datacenter.ranks.group import joined
from umbel.client.datacenter.silo.client import leading
from umbel.client.datacenter.silo.rank import SiloRank, follow
from umbel.client.errors import AppError
from umbel.client.local.batches import WHOLE, BatchPart
from umbel.client.loop import RunEnd, run_client

RANKS_FOLDER = "ranks"  # in the state directory
log = logging.getLogger("umbel.client")


def rank_part(mesh: DeviceMesh | None = None) -> BatchPart:
    """This rank's part of every batch, for a client whose ranks each train on a part (DDP, FSDP2).

    A process alone takes whole batches.

    `mesh`: the ranks of this client, as `umbel train --ranks-per-client` gives them; by default all ranks of the job.
    """
    if mesh is not None:
        return BatchPart(mesh.get_local_rank(), mesh.size())
    return BatchPart(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else WHOLE


def run_silo(
    make_client: Callable[[], Client], server: str, state_dir: Path | str, run: str, **terms: Any
) -> RunEnd | None:
    """Call it on every rank of a torchrun job: together they are one client of `run`. Returns on rank 0 how the run
    ended, and None on the others.

    Args:
        make_client: called on each rank once the process group is there, so that it can shard the model over the ranks.
            Ranks that take parts of the batches have `part = rank_part()`.
        server, run, terms: as for `run_client`.
        state_dir: this silo's own directory. Each machine keeps in it what its ranks need after a kill.

    Raises what `run_client` raises, on all ranks, and `GroupError` if a rank is lost.
    """
    with joined() as job, job.on_processors() as ranks:
        rank = SiloRank(_made(make_client), ranks, Path(state_dir) / RANKS_FOLDER)
        if not ranks.is_first:
            follow(rank)
            return None
        with leading(rank) as client:
            log.info("%s", _described(ranks.size, rank.app.part))
            return run_client(client, server, state_dir, run, **terms)


def _made(make_client: Callable[[], Client]) -> Client:
    app = make_client()
    if app.trains_in_one_call:
        raise AppError("a Flower app cannot be a client of several ranks: start it without torchrun")
    return app


def _described(n_ranks: int, part: BatchPart) -> str:
    if n_ranks == 1:
        return "this silo has one rank"
    share = f"each take one of {part.count} parts of every batch" if part.count > 1 else "all take the same batches"
    return f"this silo has {n_ranks} ranks, which {share}"
