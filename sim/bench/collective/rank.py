"""One rank of the benchmark. It trains one model for each method, over Gloo.

`python -m umbel.sim.bench.collective.rank FOLDER RANK [INTERFACE]`: the job is in the folder. Bytes are counted at the
network interface, if one is named. The methods take turns, so noise of the machine slows all of them.

(This module must not import annotations from `__future__`: DDP looks at the types of the hook's parameters themselves.)
"""

import gc
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # it is documented there
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from umbel.client.datacenter.attach import comm_hook
from umbel.sim.bench.collective.job import METHODS, SAMPLES_FILE, Answer, Job, Method, Trained
from umbel.sim.bench.collective.models import model_of, optimizer_of

_ONE_BUCKET_MB = 1 << 10  # torch's PowerSGD hangs on Gloo if there are two buckets
_COUNTERS, _SENT_COLUMN = Path("/proc/self/net/dev"), 8
_FLOAT_BYTES = 4
_SCORED_AT_ONCE = 500  # samples
_POWER_STARTS = 2  # DDP makes its buckets anew after the first step
BytesAfter: TypeAlias = Callable[[int], float]
"""How many bytes this rank has given to the network after so many steps, by the method's own count."""


def averaged_in_bf16(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """The hook of `torch.distributed.algorithms` of this name, which itself refuses processors: cast, add up, cast."""
    buffer = bucket.buffer()
    halves = buffer.to(torch.bfloat16).div_(dist.get_world_size(group))
    work: Any = dist.all_reduce(halves, group=group, async_op=True)
    added: Future[Tensor] = work.get_future().then(lambda _: buffer.copy_(halves))
    return added


@contextmanager
def hooked(ddp: DistributedDataParallel, method: Method, n_values: int) -> Generator[BytesAfter]:
    """Average the model's gradients by a method, as long as this block lasts."""
    n_ranks = dist.get_world_size()
    sent_share = 2 * (n_ranks - 1) / n_ranks  # of a vector, in a ring
    whole = _FLOAT_BYTES * n_values * sent_share
    if method.codec is not None:
        with comm_hook(ddp, codec=method.codec) as hook:
            yield lambda _: float(hook.n_bytes)
    elif method.matrix_rank is not None:
        state = PowerSGDState(None, method.matrix_rank, start_powerSGD_iter=_POWER_STARTS)
        ddp.register_comm_hook(state, powerSGD_hook)
        yield lambda _: float(state.compression_stats()[2]) * _FLOAT_BYTES * sent_share
    elif method.name == "bf16":
        ddp.register_comm_hook(dist.group.WORLD, averaged_in_bf16)
        yield lambda steps: steps * whole / 2
    else:
        yield lambda steps: steps * whole


class Trainee:
    """One model, and the method that averages its gradients."""

    def __init__(self, job: Job, method: Method, samples: tuple[Tensor, Tensor], own: ExitStack) -> None:
        self._rank, self._batch_size, self._samples = dist.get_rank(), job.batch_size, samples
        self._share = torch.arange(self._rank, len(samples[0]), job.n_ranks)
        self._draw = torch.Generator().manual_seed(1000 * job.seed + self._rank)
        bucket_cap_mb = None if method.matrix_rank is None else _ONE_BUCKET_MB
        self._ddp = DistributedDataParallel(model_of(job), bucket_cap_mb=bucket_cap_mb)
        self.n_values = sum(one.numel() for one in self._ddp.parameters())
        self._optimizer = optimizer_of(job, self._ddp.parameters())
        self._bytes_after = own.enter_context(hooked(self._ddp, method, self.n_values))
        self._n_steps = 0

    def step(self) -> None:
        """Train on one batch."""
        rows = self._share[torch.randint(len(self._share), (self._batch_size,), generator=self._draw)]
        self._optimizer.zero_grad()
        loss_of(self._ddp(self._samples[0][rows]), self._samples[1][rows]).backward()
        self._optimizer.step()
        self._n_steps += 1

    def counted_bytes(self) -> float:
        """Given to the network so far, by the method's own count."""
        return self._bytes_after(self._n_steps)

    def loss(self) -> float:
        """The mean over all samples, in nats."""
        parts = zip(*(one.split(_SCORED_AT_ONCE) for one in self._samples), strict=True)
        with torch.no_grad():
            sums = (loss_of(self._ddp.module(inputs), targets).item() * len(inputs) for inputs, targets in parts)
            return sum(sums) / len(self._samples[0])


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of classes (n,), or of classes at each place (n, length); `outputs` have one more dimension."""
    return cross_entropy(outputs.flatten(0, -2), targets.flatten())


def bytes_through(interface: str) -> int:
    """How many bytes a network interface has sent, headers included."""
    lines = _COUNTERS.read_text().splitlines()
    own = next(line for line in lines if line.strip().startswith(f"{interface}:"))
    return int(own.partition(":")[2].split()[_SENT_COLUMN])


def carry_out(job: Job, samples: tuple[Tensor, Tensor], interface: str | None) -> Answer:
    """Train with every method in turn. `interface`: whose counter is read; None: methods count their bytes."""
    steps_s = {name: list[float]() for name in job.methods}
    cpu_s, sent = dict.fromkeys(job.methods, 0.0), dict.fromkeys(job.methods, 0.0)
    with ExitStack() as own:
        trainees = {name: Trainee(job, METHODS[name], samples, own) for name in job.methods}
        for one in trainees.values():
            for _ in range(job.warm_up):
                one.step()
        for _ in range(job.blocks):
            for name, one in trainees.items():
                one.step()
                dist.barrier()
                before = one.counted_bytes() if interface is None else bytes_through(interface)
                cpu_before = time.process_time()
                for _ in range(job.steps):
                    began = time.perf_counter()
                    one.step()
                    steps_s[name].append(time.perf_counter() - began)
                cpu_s[name] += time.process_time() - cpu_before
                dist.barrier()  # before the last packets have left, the counter lacks them
                sent[name] += (one.counted_bytes() if interface is None else bytes_through(interface)) - before
        n_steps = job.blocks * job.steps
        return Answer(
            next(iter(trainees.values())).n_values,
            {
                name: Trained(steps_s[name], cpu_s[name] / n_steps, sent[name] / n_steps, one.loss())
                for name, one in trainees.items()
            },
        )


def main(folder: Path, rank: int, interface: str | None = None) -> None:
    torch.set_num_threads(1)
    job, samples = Job.read(folder), load_file(folder / SAMPLES_FILE)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=job.n_ranks)
    try:
        answer = carry_out(job, (samples["inputs"], samples["targets"]), interface)
        gc.collect()  # a callback of a hook that lives on at the end of the process can abort it
    finally:
        dist.destroy_process_group()
    answer.write(folder, rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
