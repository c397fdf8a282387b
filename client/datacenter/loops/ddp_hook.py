"""A communication hook for `DistributedDataParallel`: each bucket's mean gradient in few bits.

(This module must not import annotations from `__future__`: DDP looks at the types of the hook's parameters themselves.)
"""

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # it is documented there
from torch.futures import Future

from umbel.aggregation.collective.mean import Mean
from umbel.aggregation.seeds import derive_seed
from umbel.client.datacenter.loops.issuing import Issuer


class DdpHook:
    """The state of the hook of one model. Gradients are averaged in the order in which their buckets are ready, by one
    thread. `n_bytes`: given to the network so far.
    """

    def __init__(self, mean: Mean, issuer: Issuer, seed: int = 0) -> None:
        self._mean, self._issuer, self._seed = mean, issuer, seed
        self.steps, self.n_bytes = 0, 0

    def averaged(self, bucket: GradBucket) -> Future[Tensor]:
        """Begin to average a bucket."""
        buffer, slot, step = bucket.buffer(), bucket.index(), 0 if self._mean.feedback else self.steps
        key = derive_seed(self._seed, "gradients", slot, step)
        self.steps += bucket.is_last()
        self.n_bytes += self._mean.sent_bytes(buffer.numel())
        devices: list[int | str | torch.device] | None = [buffer.device] if buffer.device.type == "cuda" else None
        future: Future[Tensor] = Future(devices=devices)

        def averaged() -> Tensor:
            try:
                mean = self._mean.mean(buffer.to(torch.float32), key, slot)
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]  # its types take results alone
                raise
            buffer.copy_(mean)
            future.set_result(buffer)
            return buffer

        self._issuer.submit(averaged)
        return future


def average(state: DdpHook, bucket: GradBucket) -> Future[Tensor]:
    """The hook: `ddp.register_comm_hook(DdpHook(...), average)`."""
    return state.averaged(bucket)
