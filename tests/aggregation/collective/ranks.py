"""Runs a function of this repository in the ranks of a real Gloo group: `in_ranks("module:function", 2, folder)`.

Each rank is a process. It calls the function with its group, and writes the tensors that it returns by name.
"""

import gc
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor


def in_ranks(function: str, n_ranks: int, folder: Path) -> list[dict[str, Tensor]]:
    """What the function has returned on each rank."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    command = [sys.executable, __file__, function, str(folder), str(n_ranks)]
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(n_ranks)]
    try:
        assert [one.wait(timeout=240) for one in ranks] == [0] * n_ranks
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    return [load_file(folder / f"{rank}.safetensors") for rank in range(n_ranks)]


def main(function: str, folder: Path, n_ranks: int, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=n_ranks)
    module, _, name = function.partition(":")
    save_file(getattr(import_module(module), name)(dist.group.WORLD), folder / f"{rank}.safetensors")
    dist.destroy_process_group()
    gc.collect()  # see `umbel/client/datacenter/ranks/group.py`: a group that is still there may abort the process


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
