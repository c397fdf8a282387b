"""A round's sums over a process group: every rank gives its part, and gets the whole, with the same bits on each.

Every rank must make these calls in the same order. A tensor is sent from `device`, which must be one that the group's
backend sends from: the CPU for Gloo, a GPU for NCCL.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from umbel.aggregation.collective.lanes import Lanes
from umbel.aggregation.update.grid import IntegerSum

_PIECE_VALUES = 1 << 22  # 32 MiB of int64 at a time


def sum_over_ranks(part: IntegerSum, whole: IntegerSum, group: dist.ProcessGroup, device: torch.device) -> None:
    """Add the ranks' parts of one sum to `whole`, an empty sum of the same codec.

    This is exact, so `whole` has the bits that a coordinator has which adds up the same updates in any order. Raises
    `ValueError` if the weights of all ranks together are above the sum's bound.
    """
    weight, n_folded = reduced(torch.tensor([part.total_weight, part.n_folded]), group, device).tolist()
    whole.merge_sums(_reduced_pieces(part.sums, group, device), weight, n_folded)


def sum_of_levels(
    parts: Iterable[Tensor] | None, lanes: Lanes, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """The sums of all ranks' levels: int32, `lanes.n_values`, on the CPU; see `Lanes` for what is exact.

    `parts`: this rank's levels in consecutive parts; None: it adds none.
    """
    words = lanes.zeros(device) if parts is None else lanes.words(parts, device)
    dist.all_reduce(words, group=group)
    return lanes.sums(words).cpu()


def reduced(values: Tensor, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """The sum of all ranks' `values` (int64 or int32), on the CPU."""
    sent = values.to(device, copy=True)
    dist.all_reduce(sent, group=group)
    return sent.cpu()


def gather_bytes(data: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """What every rank has given, in the order of the ranks."""
    n_ranks = dist.get_world_size(group)
    lengths = torch.zeros(n_ranks, dtype=torch.int64)
    lengths[dist.get_rank(group)] = len(data)
    sizes: list[int] = reduced(lengths, group, device).tolist()
    sent = torch.zeros(max(sizes), dtype=torch.uint8)
    sent[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else sent[:0]
    got = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(n_ranks)]
    dist.all_gather(got, sent.to(device), group=group)
    return [one[:size].cpu().numpy().tobytes() for one, size in zip(got, sizes, strict=True)]


def broadcast_bytes(data: bytes, group: dist.ProcessGroup, device: torch.device) -> bytes:
    """What rank 0 has given; what others give is ignored."""
    is_first = dist.get_rank(group) == 0
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(length, group=group, group_src=0)
    n_bytes = int(length)
    sent = torch.empty(n_bytes, dtype=torch.uint8)
    if is_first and n_bytes:
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    sent = sent.to(device)
    dist.broadcast(sent, group=group, group_src=0)
    return data if is_first else sent.cpu().numpy().tobytes()


def _reduced_pieces(sums: Tensor, group: dist.ProcessGroup, device: torch.device) -> Iterator[Tensor]:
    return (reduced(piece, group, device) for piece in torch.split(sums, _PIECE_VALUES))
