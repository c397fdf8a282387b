"""Whether a training fits into the memory of its device, and what to do if it does not."""

from collections.abc import Iterator
from pathlib import Path

import torch

from umbel.client.datacenter.doctor.links import sized
from umbel.client.datacenter.doctor.steps import StepMemory
from umbel.client.findings import ClientFinding, passed, warned, wrong

_MEMORY, _LIMIT = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")  # of Linux
_FULL = 0.9  # of the memory: what is left is for fragments, and for the data


def memory_bytes(device: torch.device, n_on_host: int) -> int:
    """The memory of this rank: of its GPU, or its share of its machine's; 0 if the system does not say.

    `n_on_host`: ranks that share the machine.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    limits = [one for one in (_of_machine(), _of_container()) if one]
    return min(limits, default=0) // n_on_host


def findings_of_memory(
    memory: StepMemory, device_bytes: int, n_ranks: int, ranks_per_client: int = 1
) -> Iterator[ClientFinding]:
    """Whether parameters, gradients and the optimizer's state fit: to replicate, to shard, or to divide into stages.
    `memory`: of clients of several ranks, that of a first rank, with its own part of the model.
    """
    state = memory.parameters + memory.gradients + memory.optimizer
    said = (
        f"{sized(memory.parameters)} parameters, {sized(memory.gradients)} gradients, "
        f"{sized(memory.optimizer)} of the optimizer: {sized(state)}"
    )
    need = state
    if memory.peak is not None:
        need = memory.peak
        said += f", and {sized(memory.peak)} with activations at the peak"
    if not device_bytes:
        yield passed("memory", f"{said}; this system does not say how much memory a rank has")
        return
    said += f", of {sized(device_bytes)} for a rank"
    room = _FULL * device_bytes
    beside = need - state
    if ranks_per_client > 1:
        said = f"of a client's first rank: {said}"
        if need <= room:
            yield passed("memory", f"{said}: it fits as the {ranks_per_client} ranks of a client divide it")
        else:
            advice = (
                "shard the model over the client's ranks (FSDP2), give a client more ranks, or take smaller batches"
            )
            yield wrong("memory", said, advice)
    elif need <= room:
        yield passed("memory", f"{said}: it fits, so replicate the model on each rank")
    elif state / n_ranks + beside <= room:
        yield warned("memory", said, f"shard the model over the {n_ranks} ranks (FSDP2), or take smaller batches")
    else:
        advice = "divide the model into pipeline stages, or take more ranks: its shards do not fit either"
        yield wrong("memory", said, advice)


def _of_machine() -> int:
    try:
        lines = _MEMORY.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return 0


def _of_container() -> int:
    try:
        text = _LIMIT.read_text().strip()
        return int(text) if text.isdigit() else 0
    except OSError:
        return 0
