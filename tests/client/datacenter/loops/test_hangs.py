"""Hooks do not hang with many buckets and ranks, and ranks always end: where torch's own hooks on Gloo hang or abort.

A callback that waits for a collective occupies one of Gloo's two threads, so two buckets are enough for a hang.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from tests.aggregation.collective.ranks import in_ranks
from umbel.datacenter import CodecName, comm_hook

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(3600)]
HERE = "tests.client.datacenter.loops.test_hangs"
STEPS, N_STARTS = 200, 50
BUCKET_KB = 50
WIDTH = 100  # a weight of a layer is 40 KB, so each bucket has one or two


def trained(codec: CodecName, n_layers: int, n_steps: int) -> Tensor:
    """The last model, as one vector."""
    torch.manual_seed(0)
    layers = [one for _ in range(n_layers) for one in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=BUCKET_KB / 1024)
    optimizer, draw = SGD(ddp.parameters(), lr=0.01), torch.Generator().manual_seed(dist.get_rank())
    with comm_hook(ddp, codec=codec) as hook:
        for _ in range(n_steps):
            inputs = torch.randn(4, WIDTH, generator=draw)
            optimizer.zero_grad()
            cross_entropy(ddp(inputs), inputs.argmax(1)).backward()
            optimizer.step()
        assert hook.steps == n_steps
        return torch.cat([one.detach().reshape(-1) for one in ddp.parameters()])


def float32(_: dist.ProcessGroup) -> dict[str, Tensor]:
    return {"model": trained("float32", n_layers=12, n_steps=STEPS)}


def in_8_bits(_: dist.ProcessGroup) -> dict[str, Tensor]:
    return {"model": trained("8bit", n_layers=12, n_steps=STEPS)}


def in_4_bits(_: dist.ProcessGroup) -> dict[str, Tensor]:
    return {"model": trained("4bit", n_layers=12, n_steps=STEPS)}


def few_steps(_: dist.ProcessGroup) -> dict[str, Tensor]:
    return {"4bit": trained("4bit", n_layers=4, n_steps=3)}


@pytest.mark.parametrize("function", [float32, in_8_bits, in_4_bits])
def test_200_steps_of_four_ranks_with_buckets_of_50_kb_come_to_an_end(
    function: Callable[[dist.ProcessGroup], dict[str, Tensor]], tmp_path: Path
) -> None:
    models = [one["model"] for one in in_ranks(f"{HERE}:{function.__name__}", 4, tmp_path)]
    assert all(torch.equal(one, models[0]) for one in models)


def test_ranks_start_and_end_50_times_with_status_0(tmp_path: Path) -> None:
    """`in_ranks` compares the status of each rank with 0."""
    for number in range(N_STARTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        first, second = (one["4bit"] for one in in_ranks(f"{HERE}:few_steps", 2, folder))
        assert torch.equal(first, second)
