"""A peer of `outer_sync`: the DiLoCo of torchft (github.com/meta-pytorch/torchft), if that is installed.

Its ranks agree before each mean on who takes part (a quorum), which rank 0 serves here, and add up float32 over Gloo.
The outer optimizer is that of `outer_sync`.
"""

import importlib.util
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

MISSING = "torchft is not installed here (pip install torchft), so it is not compared."
_TIMEOUT, _JOIN_MS = timedelta(seconds=300), 60_000


def is_installed() -> bool:
    return importlib.util.find_spec("torchft") is not None


@contextmanager
def torchft_means(
    model: nn.Module, optimizer: Optimizer, every: int, rank: int, n_ranks: int, host: str, told: Callable[[int], str]
) -> Generator[None]:
    """Average the ranks' models after `every` steps of `optimizer`, as long as this block lasts.

    `host`: this rank's address. `told`: called with the port of rank 0's server, which others do not know; returns the
    server's address.
    """
    peer: Any = importlib.import_module("torchft")
    local: Any = importlib.import_module("torchft.local_sgd")
    serving: Any = importlib.import_module("torchft.coordination")
    server, port = None, 0
    if rank == 0:
        server = serving.LighthouseServer(bind="[::]:0", min_replicas=n_ranks, join_timeout_ms=_JOIN_MS)
        port = int(server.address().rpartition(":")[2])
    lighthouse = told(port)
    stores: Any = dist  # its types do not have TCPStore
    store = stores.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = peer.Manager(
        pg=peer.ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=n_ranks,
        use_async_quorum=False,
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        rank=0,  # each of our ranks is what torchft calls a replica group, of one process
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"umbel_{rank}",
        hostname=host,
        init_sync=False,  # all begin with the same model
    )
    outer = SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    try:
        with local.DiLoCo(manager, [model], optimizer, outer, every, torch.device("cpu"), pin_memory=False):
            yield
        dist.barrier()
    finally:
        manager.shutdown(wait=False)
        if server is not None:
            server.shutdown()
