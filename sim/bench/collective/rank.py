"""One rank of the benchmark. It trains one model for each method, over Gloo.

`python -m umbel.sim.bench.collective.rank FOLDER RANK [INTERFACE]`: the job is in the folder. Bytes are counted at the
network interface, if one is named. The methods take turns, so noise of the machine slows all of them.

(This module must not import annotations from `__future__`: DDP looks at the types of the hook's parameters themselves.)
"""

import gc
import sys
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # it is documented there
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from umbel.client.datacenter.loops.attach import comm_hook, outer_sync
from umbel.sim.bench.collective.hosts import address
from umbel.sim.bench.collective.job import (
    METHODS,
    RARE_FILE,
    SAMPLES_FILE,
    SETTLING_STEPS,
    Averager,
    HookAnswer,
    HookJob,
    Method,
    MethodRun,
    RareAnswer,
    RareJob,
    RareTimes,
)
from umbel.sim.bench.collective.models import model_of, optimizer_of
from umbel.sim.bench.collective.torchft_peer import torchft_means

_ONE_BUCKET_MB = 1 << 10  # torch's PowerSGD hangs on Gloo if there are two buckets; others get the same
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
    n_ranks, group = dist.get_world_size(), ddp.process_group
    sent_share = 2 * (n_ranks - 1) / n_ranks  # of a vector, in a ring
    whole = _FLOAT_BYTES * n_values * sent_share
    if method.codec is not None:
        with comm_hook(ddp, codec=method.codec) as hook:
            yield lambda _: float(hook.n_bytes)
    elif method.matrix_rank is not None:
        state = PowerSGDState(group, method.matrix_rank, start_powerSGD_iter=_POWER_STARTS)
        ddp.register_comm_hook(state, powerSGD_hook)
        yield lambda _: float(state.compression_stats()[2]) * _FLOAT_BYTES * sent_share
    elif method.name == "bf16":
        ddp.register_comm_hook(group, averaged_in_bf16)
        yield lambda steps: steps * whole / 2
    else:
        yield lambda steps: steps * whole


Samples: TypeAlias = tuple[Tensor, Tensor]


class RandomBatches:
    """This rank's share of the samples, in random batches."""

    def __init__(self, samples: Samples, size: int, seed: int) -> None:
        rank = dist.get_rank()
        self._samples, self._size = samples, size
        self._share = torch.arange(rank, len(samples[0]), dist.get_world_size())
        self._draw = torch.Generator().manual_seed(1000 * seed + rank)

    def next(self) -> Samples:
        rows = self._share[torch.randint(len(self._share), (self._size,), generator=self._draw)]
        return self._samples[0][rows], self._samples[1][rows]


class HookedModel:
    """One model, and the method that averages its gradients."""

    def __init__(self, job: HookJob, method: Method, samples: Samples, own: ExitStack) -> None:
        self._samples, self._batches = samples, RandomBatches(samples, job.batch_size, job.seed)
        # Each method has connections of its own, which are equally idle while it is others' turn.
        self._ddp = DistributedDataParallel(model_of(job), process_group=dist.new_group(), bucket_cap_mb=_ONE_BUCKET_MB)
        self.n_values = sum(one.numel() for one in self._ddp.parameters())
        self._optimizer = optimizer_of(job, self._ddp.parameters())
        self._bytes_after = own.enter_context(hooked(self._ddp, method, self.n_values))
        self._n_steps = 0

    def step(self) -> None:
        """Train on one batch."""
        step(self._ddp, self._optimizer, self._batches)
        self._n_steps += 1

    def counted_bytes(self) -> float:
        """Given to the network so far, by the method's own count."""
        return self._bytes_after(self._n_steps)

    def loss(self) -> float:
        return whole_loss(self._ddp.module, self._samples)


def step(model: nn.Module, optimizer: Optimizer, batches: RandomBatches) -> None:
    """Train on one batch."""
    inputs, targets = batches.next()
    optimizer.zero_grad()
    loss_of(model(inputs), targets).backward()
    optimizer.step()


def whole_loss(model: nn.Module, samples: Samples) -> float:
    """The mean over all samples, in nats."""
    parts = zip(*(one.split(_SCORED_AT_ONCE) for one in samples), strict=True)
    with torch.no_grad():
        sums = (loss_of(model(inputs), targets).item() * len(inputs) for inputs, targets in parts)
        return sum(sums) / len(samples[0])


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of classes (n,), or of classes at each place (n, length); `outputs` have one more dimension."""
    return cross_entropy(outputs.flatten(0, -2), targets.flatten())


def bytes_through(interface: str) -> int:
    """How many bytes a network interface has sent, headers included."""
    lines = _COUNTERS.read_text().splitlines()
    own = next(line for line in lines if line.strip().startswith(f"{interface}:"))
    return int(own.partition(":")[2].split()[_SENT_COLUMN])


def carry_out(job: HookJob, samples: Samples, interface: str | None) -> HookAnswer:
    """Train with every method in turn. `interface`: whose counter is read; None: methods count their bytes."""
    steps_s = {name: list[float]() for name in job.methods}
    cpu_s, sent = dict.fromkeys(job.methods, 0.0), dict.fromkeys(job.methods, 0.0)
    with ExitStack() as own:
        trainees = {name: HookedModel(job, METHODS[name], samples, own) for name in job.methods}
        for one in trainees.values():
            for _ in range(job.warm_up):
                one.step()
        for _ in range(job.blocks):
            for name, one in trainees.items():
                for _ in range(SETTLING_STEPS):
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
        return HookAnswer(
            next(iter(trainees.values())).n_values,
            {
                name: MethodRun(steps_s[name], cpu_s[name] / n_steps, sent[name] / n_steps, one.loss())
                for name, one in trainees.items()
            },
        )


def carry_out_rare(job: RareJob, samples: Samples, interface: str | None) -> RareAnswer:
    """Train with each number of steps between two means, and each averager, in turn."""
    times = [timed(job, every, averager, samples, interface) for every in job.everys for averager in job.averagers]
    return RareAnswer(sum(one.numel() for one in model_of(job).parameters()), times)


def averaging(
    model: nn.Module, optimizer: Optimizer, every: int, averager: Averager, interface: str | None
) -> AbstractContextManager[object]:
    """Average the ranks' models after every N steps of the optimizer, as long as this block lasts."""
    if averager != "torchft":
        return outer_sync(model, optimizer, every=every, codec=averager)
    rank = dist.get_rank()
    host = "127.0.0.1" if interface is None else address(rank)
    return torchft_means(model, optimizer, every, rank, dist.get_world_size(), host, partial(from_first, interface))


def from_first(interface: str | None, port: int) -> str:
    """The address of rank 0's server, by the port that only rank 0 knows."""
    known = torch.tensor([port])
    dist.broadcast(known, 0)
    return f"http://{'127.0.0.1' if interface is None else address(0)}:{int(known)}"


def timed(job: RareJob, every: int, averager: Averager, samples: Samples, interface: str | None) -> RareTimes:
    model, batches = model_of(job), RandomBatches(samples, job.batch_size, job.seed)
    optimizer, n_steps = optimizer_of(job, model.parameters()), job.timed_steps(every)
    trained_at, averaged_at = list[float](), list[float]()
    # Hooks of an optimizer run in the order in which they were registered: these two are before and after the mean.
    optimizer.register_step_post_hook(lambda *_: trained_at.append(time.perf_counter()))
    with averaging(model, optimizer, every, averager, interface):
        optimizer.register_step_post_hook(lambda *_: averaged_at.append(time.perf_counter()))
        for _ in range(job.untimed_means * every):
            step(model, optimizer, batches)
        dist.barrier()
        before, began = None if interface is None else bytes_through(interface), time.perf_counter()
        for _ in range(n_steps):
            step(model, optimizer, batches)
        step_s = (time.perf_counter() - began) / n_steps
        dist.barrier()
        sent = None if interface is None or before is None else (bytes_through(interface) - before) / n_steps
    means_s = [after - at for at, after in zip(trained_at, averaged_at, strict=True)]
    return RareTimes(averager, every, step_s, sum(means_s[-n_steps:]) / n_steps, sent, whole_loss(model, samples))


def main(folder: Path, rank: int, interface: str | None = None) -> None:
    torch.set_num_threads(1)
    loaded = load_file(folder / SAMPLES_FILE)
    samples, is_rare = (loaded["inputs"], loaded["targets"]), (folder / RARE_FILE).exists()
    job = RareJob.read(folder) if is_rare else HookJob.read(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=job.n_ranks)
    try:
        if isinstance(job, RareJob):
            answer: HookAnswer | RareAnswer = carry_out_rare(job, samples, interface)
        else:
            answer = carry_out(job, samples, interface)
        gc.collect()  # a callback of a hook that lives on at the end of the process can abort it
    finally:
        dist.destroy_process_group()
    answer.write(folder, rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
