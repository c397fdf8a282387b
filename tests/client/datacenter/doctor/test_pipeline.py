"""The work of layers and stages, as real ranks count it together."""

import json
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor, nn

from examples.silo_of_ranks import Stage
from tests.aggregation.collective.ranks import in_ranks
from tests.client.datacenter.doctor.jobs import RUN_FILE, make_communication_bound, make_failing_at_rank_1
from umbel.aggregation.run.file import RunFile
from umbel.client.datacenter.doctor.pipeline import division_of_model, have_stages, measured_stages
from umbel.client.datacenter.doctor.stages import PipelineStages
from umbel.client.datacenter.doctor.steps import StepTimer
from umbel.client.datacenter.ranks.group import Group

HERE = "tests.client.datacenter.doctor.test_pipeline"
FILE = TypeAdapter(RunFile).validate_python(tomllib.loads(RUN_FILE.replace("batch_size = 3", "batch_size = 16")))
ADAPTER = TypeAdapter(PipelineStages | str)


def counted(group: dist.ProcessGroup) -> dict[str, Tensor]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine = Group(rank, size, torch.device("cpu"), group)
    copies, failing = make_communication_bound(rank, size), make_failing_at_rank_1(rank, size)
    stage = Stage(nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 2)))
    of_failing = StepTimer(mine, FILE, failing)
    division_of_model(mine, of_failing)  # its second step fails
    found = {
        "are stages": [have_stages(mine, copies), have_stages(mine, stage)],
        "too few": division_of_model(mine, StepTimer(mine, FILE, copies)),
        "failing": division_of_model(mine, of_failing),
        "own": ADAPTER.dump_python(measured_stages(mine, FILE, stage)),
    }
    return {"found": torch.tensor(list(json.dumps(found).encode()))}


@pytest.mark.slow
def test_ranks_agree_on_the_work_of_layers_and_of_their_own_stages(tmp_path: Path) -> None:
    first, second = (json.loads(bytes(one["found"].tolist())) for one in in_ranks(f"{HERE}:counted", 2, tmp_path))
    assert first == second
    assert first["are stages"] == [False, True]
    assert first["too few"] == "the model has only 1 layer for 2 pipeline stages"
    assert first["failing"].startswith("the work of the layers cannot be counted: rank 1: ")
    own = ADAPTER.validate_python(first["own"])
    assert isinstance(own, PipelineStages)
    assert [(one.first, one.last) for one in own.stages] == [("0", "1"), ("2", "3")]
    n = 16  # of a batch, in two micro-batches
    assert own.stages[0].work == 2 * 2 * n * 30 * 64
    assert own.stages[1].work == 3 * 2 * n * 64 * 2
    assert own.slowest == 0
    assert own.n_micro_batches == 8
