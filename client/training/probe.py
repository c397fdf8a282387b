"""What a client measures of itself in a canary: the time of a step, the bandwidth, the free memory."""

import math
import resource
import sys
from pathlib import Path

import torch

from umbel.aggregation.plans.assignment import Assignment
from umbel.aggregation.reports import Probe
from umbel.aggregation.types import METRIC_ABS_MAX
from umbel.client.app import Client
from umbel.client.local.plan import LocalPlan
from umbel.client.local.results import TrainResult
from umbel.client.wire.timing import Bandwidth

_STATUS = Path("/proc/self/status")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # getrusage(2): kilobytes, but on a Mac bytes


def probe_of(app: Client, result: TrainResult, step_s: float, offer: Assignment, bandwidth: Bandwidth) -> Probe:
    """The measurements after training, before the upload. Raises `ValueError` if the step counts are inconsistent."""
    mean = result.metrics.get("loss")
    first, last = result.first_loss, mean if result.last_loss is None else result.last_loss
    device, device_total = _device_memory()
    return Probe(
        steps_full=_steps_full(app, result, offer),
        step_s=step_s,
        download_bytes_per_s=bandwidth.down,
        memory_bytes=memory_peak_bytes(),
        memory_free_bytes=memory_free_bytes(),
        device_memory_bytes=device,
        device_memory_total_bytes=device_total,
        first_loss=_kept(first),
        last_loss=_kept(last),
        is_loss_finite=all(loss is None or math.isfinite(loss) for loss in (first, last, mean)),
    )


def memory_peak_bytes() -> int:
    """The peak memory of this process. On Linux `getrusage` would give its parent's, if that was higher."""
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


def memory_free_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """The memory that the machine and the container (cgroup v2) leave to this process; None if neither says."""
    known = [one for one in (_of_machine(meminfo), _of_container(cgroup)) if one is not None]
    return max(0, min(known)) if known else None


def _steps_full(app: Client, result: TrainResult, offer: Assignment) -> int:
    """The steps of a whole round's work; an estimate if the site's code does not say."""
    if result.steps_full is not None:
        return result.steps_full
    asked = offer.training
    n_batches = math.ceil(app.sample_count / asked.batch_size)
    plan = LocalPlan(epochs=asked.local_epochs, steps=asked.local_steps)
    return max(plan.full_steps_for(n_batches), result.steps_planned)


def _device_memory() -> tuple[int | None, int | None]:
    """The peak of this process on its fullest GPU, and that GPU's memory; None without a GPU in use."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None, None
    devices = [
        (torch.cuda.max_memory_reserved(i), torch.cuda.get_device_properties(i).total_memory)
        for i in range(torch.cuda.device_count())
    ]
    used, total = max(devices, key=lambda device: device[0] / device[1])
    return (used, total) if used else (None, None)


def _of_machine(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else None


def _of_container(cgroup: Path) -> int | None:
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return int(limit) - int(used) if limit.isdigit() and used.isdigit() else None


def _kept(loss: float | None) -> float | None:
    return loss if loss is not None and abs(loss) <= METRIC_ABS_MAX else None
