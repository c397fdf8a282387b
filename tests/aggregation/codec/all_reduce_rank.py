"""One rank of a real all-reduce, as a program: `all_reduce_rank.py RANK N_RANKS FOLDER N_VALUES`.

It writes what it decoded, by way, to FOLDER/RANK.safetensors.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from umbel.aggregation.codec.lanes import AllReduced, ByteLanes, Lanes
from umbel.aggregation.codec.rotated import Rotated
from umbel.aggregation.plans.codec import Codec, CodecPlan

INVERSE_STEP, KEY = 4.0, 41


def gradient(rank: int, n_values: int) -> torch.Tensor:
    return torch.randn(n_values, generator=torch.Generator().manual_seed(rank))


def ways(n_values: int, n_ranks: int) -> dict[str, AllReduced]:
    rotated = Rotated(CodecPlan(Codec.INTEGER, INVERSE_STEP, KEY), n_values)
    return {
        "bytes": ByteLanes(rotated, n_ranks),
        "lanes of 8 in 64": Lanes(rotated, n_ranks, bits=8),
        "lanes of 7 in 32": Lanes(rotated, n_ranks, bits=7, word_bits=32),
    }


def main(rank: int, n_ranks: int, folder: Path, n_values: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=n_ranks)
    found: dict[str, torch.Tensor] = {}
    for name, way in ways(n_values, n_ranks).items():
        tensor = way.encode(gradient(rank, n_values), rank)
        dist.all_reduce(tensor)
        found[f"{name}: sum"] = torch.cat(list(way.sums(tensor)))
        found[f"{name}: mean"] = way.mean(tensor)
        found[f"{name}: next"] = torch.tensor(way.plan_after(tensor).inverse_step)
    save_file(found, folder / f"{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
