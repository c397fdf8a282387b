"""A communication hook for `DistributedDataParallel`: each bucket's mean gradient in few bits.

(This module must not import annotations from `__future__`: DDP looks at the types of the hook's parameters themselves.)
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from umbel.aggregation.collective.mean import Mean
from umbel.aggregation.seeds import derive_seed
from umbel.client.datacenter.issuing import Issuer


class DdpHook:
    """The state of the hook of one model. Gradients are averaged in the order in which their buckets are ready, by one
    thread. `n_bytes`: given to the network so far.
    """

    def __init__(self, mean: Mean, issuer: Issuer, seed: int = 0) -> None:
        self._mean, self._issuer, self._seed = mean, issuer, seed
        self.steps, self.n_bytes = 0, 0

    def averaged(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Begin to average a bucket."""
        buffer, slot, step = bucket.buffer(), bucket.index(), 0 if self._mean.feedback else self.steps
        key = derive_seed(self._seed, "gradients", slot, step)
        self.steps += bucket.is_last()
        self.n_bytes += self._mean.sent_bytes(buffer.numel())
        devices = [buffer.device] if buffer.device.type == "cuda" else None
        future: Future[Tensor] = Future(devices=devices)

        def average() -> Tensor:
            try:
                made = buffer.copy_(self._mean.mean(buffer.to(torch.float32), key, slot))
            except BaseException as error:
                future.set_exception(error)
                raise
            future.set_result(made)
            return made

        self._issuer.submit(average)
        return future


def average(state: DdpHook, bucket: dist.GradBucket) -> Future[Tensor]:
    """The hook: `ddp.register_comm_hook(DdpHook(...), average)`."""
    return state.averaged(bucket)
