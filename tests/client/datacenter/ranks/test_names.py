"""Where a job has several clients, a message says which client a rank belongs to."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from tests.client.datacenter.ranks.said_by_ranks import SaidByRanks
from umbel.client import TorchClient, TrainResult
from umbel.client.datacenter.ranks.group import GroupError
from umbel.client.datacenter.ranks.names import CLIENTS, RANKS, ranks_of_client
from umbel.client.datacenter.ranks.samples import require_same_samples
from umbel.client.datacenter.ranks.waiting import RankWaits
from umbel.client.datacenter.silo.rank import require_parts
from umbel.client.datacenter.silo.results import one_training
from umbel.client.datacenter.train.shards import compared_shards
from umbel.client.local.batches import BatchPart

ALL = TensorDataset(torch.randn(900, 4, generator=torch.Generator().manual_seed(0)), torch.arange(900) % 3)
OF_SECOND = ranks_of_client(1, 2)


def client(data: object) -> TorchClient:
    return TorchClient(nn.Linear(4, 3), "classes", data, device="cpu")  # type: ignore[arg-type]


def test_ranks_of_the_only_client_have_no_more_than_their_numbers() -> None:
    assert ranks_of_client(0, 1) == RANKS
    assert [names.of(2) for names in (RANKS, OF_SECOND, CLIENTS)] == ["rank 2", "rank 2 of client 1", "client 2"]
    assert [names.of_several("0, 2") for names in (OF_SECOND, CLIENTS)] == ["ranks 0, 2 of client 1", "clients 0, 2"]


def test_what_ranks_of_a_client_have_done_is_said_with_the_client(caplog: pytest.LogCaptureFixture) -> None:
    parts = [BatchPart(0, 2), BatchPart(1, 2)]
    with pytest.raises(GroupError, match=r"on rank 1 of client 1, and 3 on rank 0 of client 1.* of the whole client"):
        one_training(parts, [TrainResult(9, 3, 3), TrainResult(9, 2, 3)], OF_SECOND)
    one_training(parts, [TrainResult(9, 3, 3), TrainResult(9, 3, 3, {"loss": float("inf")})], OF_SECOND)
    assert caplog.messages == ["rank 1 of client 1 has measured loss = inf"]
    with pytest.raises(GroupError, match="make no whole: rank 0 of client 1 takes part 0 of 2, rank 1 of client 1"):
        require_parts([BatchPart(0, 2), BatchPart(0, 2)], OF_SECOND)
    ranks = SaidByRanks(OF_SECOND)
    require_same_samples(ranks.begin(), client(ALL))
    with pytest.raises(GroupError, match="rank 1 of client 1 has other training samples than rank 0 of client 1"):
        require_same_samples(ranks.begin(), client(Subset(ALL, range(450))))


def test_clients_that_share_samples_are_named_as_clients() -> None:
    ranks = SaidByRanks(CLIENTS)
    compared_shards(ranks.begin(), client(ALL), [900], may_share=False)
    with pytest.raises(GroupError, match="samples of client 1 are on client 0 too: give each client its own share"):
        compared_shards(ranks.begin(), client(ALL), [900, 900], may_share=False)


@pytest.mark.parametrize(("came", "missing"), [({0, 1}, "rank 2 of client 1"), ({0}, "ranks 1, 2 of client 1")])
def test_ranks_that_are_awaited_are_named_with_their_client(
    came: set[int], missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()

    class Store:
        """Has the marks of the ranks that wait."""

        def set(self, key: str, value: bytes) -> None: ...

        def check(self, keys: list[str]) -> bool:
            rank = int(keys[0].rpartition("_")[2])
            if rank == 2:
                told.set()
            return rank in came

    caplog.set_level("INFO", "umbel.client")
    with RankWaits(0, 3, Store(), OF_SECOND, mark_s=0.0, first_s=0.0).told("the others"):
        assert told.wait(60)
    assert caplog.messages[0].startswith("rank 0 of client 1 has waited ")
    assert caplog.messages[0].endswith(f" for the others; missing: {missing}")
