"""Messages between two ranks that begin together, of which the measured sums are made."""

from collections.abc import Sequence
from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor

Parts: TypeAlias = Sequence[tuple[Tensor, int]]
"""Tensors, each with the other rank's number in the group. Empty tensors are neither sent nor received."""


def exchange(sent: Parts, received: Parts, group: dist.ProcessGroup) -> None:
    """Send and receive at the same time, and wait until both are done."""
    for work in begun(sent, received, group):
        work.wait()


def begun(sent: Parts, received: Parts, group: dist.ProcessGroup) -> list[dist.Work]:
    """Begin to send and to receive. Receptions come first: a rank asks for data before it fills the network with its
    own.
    """
    operations = [dist.P2POp(dist.irecv, one, group=group, group_peer=rank) for one, rank in received if len(one)]
    operations += [dist.P2POp(dist.isend, one, group=group, group_peer=rank) for one, rank in sent if len(one)]
    return dist.batch_isend_irecv(operations) if operations else []


def can_ask_early(group: dist.ProcessGroup) -> bool:
    """Whether receptions may begin long before the sender sends. NCCL runs them in their order, and would hang."""
    return dist.get_backend(group) == "gloo"
