"""Starts the ranks of a job as processes of this machine, and reads their answers."""

import tempfile
from pathlib import Path
from typing import Protocol, TypeVar

from safetensors.torch import save_file

from umbel.sim.bench.collective.job import SAMPLES_FILE
from umbel.sim.bench.collective.links import Link
from umbel.sim.data.data_set import SampleSet
from umbel.sim.processes import start, stopping, wait_until

_RANK = "umbel.sim.bench.collective.rank"


Found_co = TypeVar("Found_co", covariant=True)


class RankJob(Protocol[Found_co]):
    """What ranks are asked to do."""

    @property
    def n_ranks(self) -> int: ...

    def write(self, folder: Path) -> None: ...

    def answer(self, folder: Path, rank: int) -> Found_co:
        """What a rank has found."""
        ...


def run_ranks(job: RankJob[Found_co], samples: SampleSet, link: Link, limit_s: float) -> list[Found_co]:
    """The answers of all ranks. Raises `ChildDied`, and `TimeoutError` after `limit_s`."""
    with tempfile.TemporaryDirectory(prefix="umbel-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        job.write(folder)
        save_file(
            {"inputs": samples.inputs.flatten(1).contiguous(), "targets": samples.targets.contiguous()},
            folder / SAMPLES_FILE,
        )
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
        return [job.answer(folder, rank) for rank in range(job.n_ranks)]
