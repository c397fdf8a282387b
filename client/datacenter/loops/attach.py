"""What a training loop of one's own calls: `outer_sync` (rare means of the model) and `comm_hook` (means of gradients).

Under torchrun the ranks of the job take part. Without a process group, one process is the only rank, so that the same
loop runs on a laptop.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from umbel.aggregation.collective.exchange import ExchangeMean
from umbel.aggregation.collective.mean import Float32Mean, Mean
from umbel.aggregation.collective.sums import gather_bytes
from umbel.client.datacenter.loops.ddp_hook import DdpHook, average
from umbel.client.datacenter.loops.fsdp_hook import FsdpHook, detach, sharded_modules
from umbel.client.datacenter.loops.issuing import Issuer
from umbel.client.datacenter.loops.mean_record import MeanRecord
from umbel.client.datacenter.loops.outer_sync import Outer, OuterSync, nesterov
from umbel.client.datacenter.ranks.group import joined

_TIMEOUT = timedelta(minutes=10)  # for which a rank waits for the others
_BITS = {"8bit": 8, "4bit": 4, "2bit": 2}
CodecName: TypeAlias = Literal["float32", "8bit", "4bit", "2bit"]
"""How many bits a value takes on the network. "2bit" has error feedback, for rare means."""


@contextmanager
def outer_sync(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    every: int,
    codec: CodecName = "float32",
    outer: Outer = nesterov,
    fragments: int = 1,
    delay: int = 0,
    keep: float = 0.0,
    seed: int = 0,
    on_mean: Callable[[MeanRecord], None] | None = None,
) -> Generator[OuterSync]:
    """Average the ranks' models after `every` steps of `optimizer`, as long as this block lasts.

    At its beginning all ranks get the model of rank 0. At its end the ranks average what they have trained since the
    last time, so that all leave it with the same model, unless it ends by an exception.

    `outer`: makes the outer optimizer of some parameters; by default Nesterov with a rate of 0.7 and a momentum of 0.9.
    `fragments`, `delay` and `keep`: see `outer_sync.py`. `seed`: of the rotations, the same on all ranks. `on_mean`:
    called by this rank's loop after each mean, with its record. Raises `ValueError` for numbers that do not fit
    together, `TypeError` for what is no number, and `GroupError` if another rank is lost.
    """
    device = next(model.parameters()).device
    terms = repr((every, codec, fragments, delay, keep, seed, [_kind(one) for one in model.state_dict().items()]))
    with _own_group() as group, Issuer(device) as issuer:
        _require_alike(terms, group, device)
        for one in (*model.parameters(), *model.buffers()):
            dist.broadcast(one.data, group=group, group_src=0)
        means = mean_of(codec, group), Float32Mean(group)
        sync = OuterSync(
            model,
            *means,
            issuer,
            every=every,
            outer=outer,
            fragments=fragments,
            delay=delay,
            keep=keep,
            seed=seed,
            on_mean=on_mean,
        )
        handle = optimizer.register_step_post_hook(lambda *_: sync.stepped())
        try:
            yield sync
            sync.finish()
        finally:
            handle.remove()


@contextmanager
def comm_hook(model: nn.Module, *, codec: CodecName = "4bit", seed: int = 0) -> Generator[DdpHook | FsdpHook]:
    """Average the gradients of a DDP or FSDP2 model in few bits, as long as this block lasts; train only inside it.

    `seed`: of the rotations, the same on all ranks. Raises `ValueError` for another model.
    """
    if isinstance(model, DistributedDataParallel):
        ranks = dist.get_process_group_ranks(model.process_group)
        with _own_group(ranks) as group, Issuer(next(model.parameters()).device) as issuer:
            _require_alike(repr((codec, seed)), group, next(model.parameters()).device)
            hook = DdpHook(mean_of(codec, group), issuer, seed)
            model.register_comm_hook(hook, average)
            yield hook
        return
    if not sharded_modules(model):
        raise ValueError(
            f"comm_hook takes a DistributedDataParallel, or a model to which fully_shard was applied, not a plain "
            f"{type(model).__name__}"
        )
    if codec == "float32" or codec == "2bit":
        raise ValueError('for a model of fully_shard the codec must be "4bit" or "8bit": float32 needs no hook')
    with _own_group() as group:
        _require_alike(repr((codec, seed)), group, next(model.parameters()).device)
    of_shards = FsdpHook(_BITS[codec], seed)
    of_shards.attach(model)
    try:
        yield of_shards
    finally:
        detach(model)


def mean_of(codec: CodecName, group: dist.ProcessGroup) -> Mean:
    """Raises `ValueError` for an unknown name."""
    if codec == "float32":
        return Float32Mean(group)
    if codec not in _BITS:
        raise ValueError(f'codec must be one of "float32", "8bit", "4bit" and "2bit", not {codec!r}')
    return ExchangeMean(group, _BITS[codec], feedback=codec == "2bit")


def _kind(named: tuple[str, Tensor]) -> tuple[str, list[int], str]:
    """Raises `ValueError` for a tensor of a type that float32 cannot stand for."""
    name, tensor = named
    if tensor.is_complex():
        raise ValueError(f"tensor {name!r} is complex, and means are taken of real numbers")
    return name, list(tensor.shape), str(tensor.dtype)


def _require_alike(terms: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise `ValueError` unless all ranks have come with the same terms."""
    wire = device if dist.get_backend(group) == "nccl" else torch.device("cpu")
    by_rank = gather_bytes(terms.encode(), group, wire)
    if odd := [rank for rank, one in enumerate(by_rank) if one != by_rank[0]]:
        raise ValueError(
            f"rank {odd[0]} has come with another model, or with other arguments, than rank 0: all ranks need the same"
        )


@contextmanager
def _own_group(ranks: list[int] | None = None) -> Generator[dist.ProcessGroup]:
    """A group for umbel alone, of all ranks or of these: its collectives come from another thread than the loop's."""
    if not dist.is_initialized():
        with joined() as alone:
            yield alone.process_group
        return
    is_whole = ranks is None or len(ranks) == dist.get_world_size()
    group = dist.new_group(None if is_whole else ranks, timeout=_TIMEOUT, use_local_synchronization=not is_whole)
    assert isinstance(group, dist.ProcessGroup), "this rank is in it"
    try:
        yield group
    finally:
        if is_whole:
            dist.destroy_process_group(group)
        # Torch names a group of some ranks after these and after how many groups there are. If it were destroyed, the
        # next one would have its name, find its addresses in the store, and wait for them without end. So it lives on.
