"""Take part in a run as one client of several ranks. Only rank 0 speaks to the coordinator."""

import logging
import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from umbel.client.app import Client
from umbel.client.datacenter.ranks.group import GroupError, joined
from umbel.client.datacenter.silo.client import SiloClient
from umbel.client.datacenter.silo.rank import SiloRank, follow
from umbel.client.errors import AppError
from umbel.client.local.batches import WHOLE, BatchPart
from umbel.client.loop import RunEnd, run_client

RANKS_FOLDER = "ranks"  # in the state directory
log = logging.getLogger("umbel.client")


def rank_part() -> BatchPart:
    """This rank's part of every batch, for a silo whose ranks each train on a part (DDP, FSDP2). A process alone takes
    whole batches.
    """
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
        if ranks.is_first:
            return _lead(rank, server, state_dir, run, terms)
        rank.tensors.collect({})
        with _signals_ignored():
            follow(rank)
        return None


def _made(make_client: Callable[[], Client]) -> Client:
    app = make_client()
    if app.trains_in_one_call:
        raise AppError("a Flower app cannot be a client of several ranks: start it without torchrun")
    return app


def _lead(rank: SiloRank, server: str, state_dir: Path | str, run: str, terms: Mapping[str, Any]) -> RunEnd:
    client = SiloClient(rank)
    client.begin()
    log.info("this silo has %d ranks, which %s", rank.ranks.size, _share_of(rank.app.part))
    try:
        end = run_client(client, server, state_dir, run, **terms)
    except GroupError:
        raise  # nobody is there to hear it
    except BaseException as error:
        client.end(str(error), failed=True)
        raise
    client.end(end.reason, failed=False)
    return end


def _share_of(part: BatchPart) -> str:
    return f"each take one of {part.count} parts of every batch" if part.count > 1 else "all take the same batches"


@contextmanager
def _signals_ignored() -> Generator[None]:
    """Rank 0 decides when the silo leaves."""
    before = {one: signal.signal(one, signal.SIG_IGN) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
