"""A job of two clients with two ranks each, in a real group: its steps are those of whole clients."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from examples.silo_of_ranks import Stage
from tests.aggregation.collective.ranks import in_ranks
from tests.client.datacenter.doctor.jobs import PAUSE_S, Samples, Small
from umbel.aggregation.run.file import RunFile
from umbel.client import Client, TorchClient
from umbel.client.datacenter.doctor.divided import DividedCheck, measured_clients
from umbel.client.datacenter.doctor.facts import RankFacts
from umbel.client.datacenter.doctor.job import findings_of
from umbel.client.datacenter.doctor.rounds import RoundAdvice
from umbel.client.datacenter.ranks.group import Group
from umbel.client.datacenter.train.division import ClientRanks, divided
from umbel.datacenter import rank_part

HERE = "tests.client.datacenter.doctor.test_divided"
RUN_FILE = """
name = "job"
rounds = { count = 1, target = 2, minimum = 2, over_selection = 1.0 }
training = { local_steps = 1, batch_size = 8 }
"""
FILE = TypeAdapter(RunFile).validate_python(tomllib.loads(RUN_FILE))
_stores: Any = dist  # PrefixStore is documented there, but its types do not have it
HOSTS = ["north", "north", "south", "south"]
FACTS = [RankFacts(host, {}, "processor", 0, 2) for host in HOSTS]


def reading(mesh: DeviceMesh, number: int) -> Client:
    """Waits for its data. The first client shards its model, and the second replicates it."""
    small: nn.Module = Small()
    if number == 0:
        fully_shard(small, mesh=mesh)
    else:
        small = DistributedDataParallel(small, process_group=mesh.get_group(), find_unused_parameters=True)
    data = Samples(PAUSE_S / 4)
    return TorchClient(small, nn.CrossEntropyLoss(), data, device="cpu", part=rank_part(mesh))


class _StageOfClient(Stage):
    """The first rank has nearly all of the work."""

    def __init__(self, mesh: DeviceMesh) -> None:
        whole = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 2))
        super().__init__(whole)
        rank = mesh.get_local_rank()
        self._is_last = rank == 1
        self.model = nn.Sequential()
        for place in (2 * rank, 2 * rank + 1):
            self.model.add_module(str(place), whole[place])
        stage = PipelineStage(self.model, rank, 2, torch.device("cpu"), group=mesh.get_group())
        self._schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.cross_entropy)


class _Broken(TorchClient):
    def train(self, model: nn.Module, plan: Any) -> Any:
        raise OSError("no such drive")


def broken(mesh: DeviceMesh, number: int) -> Client:
    return _Broken(Small(), nn.CrossEntropyLoss(), Samples(), device="cpu")


def measured(group: dist.ProcessGroup) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]  # as `joined` keeps it
    rank, found = dist.get_rank(group), dict[str, Any]()
    for name in ("reading", "staged", "broken"):
        job = Group(rank, 4, torch.device("cpu"), group, _board=_stores.PrefixStore(name, store))
        ranks = divided(job, 2, 120.0)
        check = measured_clients(ranks, FILE, _client(name, ranks), HOSTS, budget_s=0.1)
        found[name] = None if check is None else _said(check)
    return {"found": torch.tensor(list(json.dumps(found).encode()))}


def _client(name: str, ranks: ClientRanks) -> Client:
    torch.manual_seed(3)
    if name == "staged":
        return _StageOfClient(ranks.mesh)
    return (reading if name == "reading" else broken)(ranks.mesh, ranks.number)


def _said(check: DividedCheck) -> dict[str, Any]:
    job = check.job
    if job is None:
        return {"failed": str(check.failed)}
    assert check.sums is not None
    assert isinstance(job.rounds, RoundAdvice), job.rounds
    return {
        "ranks_per_client": job.ranks_per_client,
        "n_clients": len(job.alone_s),
        "memory": [job.memory.parameters, job.memory.gradients],
        "bound": job.steps.bound,
        "input": job.steps.input_share,
        "steps": [job.rounds.local_steps, job.rounds.measured],
        "summed": [check.sums.n_bytes, 4 * job.n_values],
        "stages": None if check.stages is None else [one.work for one in check.stages.stages],
        "findings": {one.check: [one.verdict, one.found, one.advice] for one in findings_of(job, FACTS)},
    }


@pytest.mark.realtime
def test_the_steps_of_whole_clients_are_measured_and_sums_go_over_their_first_ranks(tmp_path: Path) -> None:
    by_rank = [json.loads(bytes(one["found"].tolist())) for one in in_ranks(f"{HERE}:measured", 4, tmp_path)]
    assert by_rank[1] == by_rank[3] == {"reading": None, "staged": None, "broken": None}, "other ranks follow"
    first, second = by_rank[0], by_rank[2]
    for one in (first["reading"], second["reading"]):
        assert (one["ranks_per_client"], one["n_clients"]) == (2, 2)
        # One repeated batch needs no reading. Every rank reads half of each batch, which takes a pause for a sample.
        assert one["input"] > 0.5
        assert one["bound"] == "input"
        assert one["summed"][0] == one["summed"][1]
        assert one["findings"]["advice"][0] == "skipped"
        assert one["findings"]["umbel train"][0] in ("pass", "warning")
        assert one["steps"][0] >= 1
    small = 4 * (4 * 2 + 2)
    assert first["reading"]["memory"] == [small // 2, small // 2], "its shard"
    assert second["reading"]["memory"] == [small, small], "its copy"
    assert first["reading"]["findings"]["memory"][1].startswith("of a client's first rank: 20 bytes parameters")
    works = first["staged"]["stages"]
    assert works == second["staged"]["stages"]
    assert works[0] > 5 * works[1] > 0
    for one in (first["broken"], second["broken"]):
        assert one["failed"].startswith("client 0: the client's own code failed")
        assert "OSError" in one["failed"]
