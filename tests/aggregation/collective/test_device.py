"""Means in few bits stay on the device of their vectors: nothing is read back from it, and nothing meets there that is
elsewhere. Fake tensors on torch's "meta" device stand for those of a GPU, and a group that sends nothing for others.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from umbel.aggregation.collective.exchange import ExchangeMean
from umbel.aggregation.collective.mean import Float32Mean
from umbel.aggregation.collective.scatter import ScatterMean

pytestmark = pytest.mark.slow
N_RANKS, N = 3, 30_000
Mean = Callable[[Tensor, int], Tensor]
MEANS: dict[str, Callable[[dist.ProcessGroup], Mean]] = {
    "float32": lambda group: Float32Mean(group).mean,
    "exchange, 8 bits": lambda group: ExchangeMean(group, 8).mean,
    "exchange, 4 bits": lambda group: ExchangeMean(group, 4).mean,
    "exchange, 2 bits with feedback": lambda group: ExchangeMean(group, 2, feedback=True).mean,
    "scatter, 8 bits": lambda group: ScatterMean(group, 8).mean_of_part,
    "scatter, 4 bits": lambda group: ScatterMean(group, 4).mean_of_part,
}


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=N_RANKS)
    try:
        assert dist.group.WORLD is not None
        with FakeTensorMode():
            yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_made_where_its_vectors_are(name: str, group: dist.ProcessGroup) -> None:
    mean = MEANS[name](group)
    for step in range(2):  # feedback comes in with the second one
        made = mean(torch.empty(N, device="meta"), step)
        assert made.device.type == "meta"
        assert made.numel() == (N // N_RANKS if name.startswith("scatter") else N)


def test_what_is_read_back_is_found_out(group: dist.ProcessGroup) -> None:
    with pytest.raises(DataDependentOutputException):
        float(torch.empty(N, device="meta").norm())
    with pytest.raises(FakeTensorDeviceMismatchError):
        torch.add(torch.empty(3), torch.empty(3, device="meta"))
