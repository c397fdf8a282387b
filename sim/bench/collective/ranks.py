"""Starts the ranks of a job as processes of this machine, and reads their answers."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors.torch import save_file

from umbel.sim.bench.collective.job import SAMPLES_FILE, Answer, Job
from umbel.sim.data.data_set import SampleSet
from umbel.sim.processes import start, stopping, wait_until

_RANK = "umbel.sim.bench.collective.rank"


class Link(Protocol):
    """Where ranks run, and by which interface they reach each other."""

    @property
    def title(self) -> str: ...

    @property
    def mbit_s(self) -> float | None:
        """Of each rank, both ways; None without a limit."""
        ...

    @property
    def round_trip_ms(self) -> float: ...

    @property
    def interface(self) -> str: ...

    @property
    def is_counted(self) -> bool:
        """Whether only the ranks use the interface, so that its counter has their bytes."""
        ...

    def prefix(self, rank: int) -> Sequence[str]:
        """The command that runs a program where this rank is."""
        ...


@dataclass(frozen=True, slots=True)
class Loopback:
    """All ranks on this machine, without a network between them."""

    title: str = "loopback"
    mbit_s: float | None = None
    round_trip_ms: float = 0.0
    interface: str = "lo"
    is_counted: bool = False

    def prefix(self, rank: int) -> Sequence[str]:
        return ()


def run_ranks(job: Job, samples: SampleSet, link: Link, limit_s: float) -> list[Answer]:
    """The answers of all ranks. Raises `ChildDied`, and `TimeoutError` after `limit_s`."""
    with tempfile.TemporaryDirectory(prefix="umbel-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        job.write(folder)
        save_file({"inputs": samples.inputs.flatten(1).contiguous(), "targets": samples.targets}, folder / SAMPLES_FILE)
        environment = {"GLOO_SOCKET_IFNAME": link.interface}
        counted = [link.interface] if link.is_counted else []
        with stopping([]) as children:
            for rank in range(job.n_ranks):
                argv = ["-m", "umbel.sim.processes", _RANK, str(folder), str(rank), *counted]
                log = folder / f"{rank}.log"
                children.append(start(f"rank {rank}", argv, log, prefix=link.prefix(rank), environment=environment))
            wait_until(
                lambda: all(one.process.poll() == 0 for one in children),
                children,
                limit_s,
                f"the {job.n_ranks} ranks of a job",
                may_finish=True,
            )
        return [Answer.read(folder, rank) for rank in range(job.n_ranks)]
