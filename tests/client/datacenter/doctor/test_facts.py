"""The ranks' versions and devices: the rank that differs is named, with its value and the others'."""

import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.aggregation.collective.ranks import in_ranks
from umbel.client.datacenter.doctor.facts import RankFacts, facts_of_all, facts_of_this_rank, findings_of
from umbel.client.datacenter.ranks.group import Group

HERE = "tests.client.datacenter.doctor.test_facts"
CPU = torch.device("cpu")
FACTS = RankFacts("north", {"torch": "2.13.0", "NCCL": "2.27.3"}, "processor", 0, 8)


def sentences(*facts: RankFacts) -> list[str]:
    return [str(one) for one in findings_of(facts)]


def test_ranks_that_agree_are_one_line_with_their_versions() -> None:
    assert sentences(FACTS, FACTS, replace(FACTS, host="south")) == [
        "versions: pass: 3 ranks on 2 hosts (north, south) have torch 2.13.0, NCCL 2.27.3",
        "devices: pass: north: 2 ranks, 8 processors, no GPU",
        "devices: pass: south: 1 rank, 8 processors, no GPU",
    ]


def test_the_odd_rank_is_named_with_its_host_and_both_values() -> None:
    odd = replace(FACTS, host="south", versions={"torch": "2.13.0", "NCCL": "2.21.5"})
    found = sentences(FACTS, FACTS, odd)
    assert found[0] == (
        "versions: wrong: rank 2 (on south) has NCCL 2.21.5, but rank 0 (on north) and 1 other rank have 2.27.3. "
        "install the same NCCL on all machines"
    )
    assert not any("versions: pass" in one for one in found)


def test_a_rank_of_an_older_umbel_that_does_not_say_a_version_is_named() -> None:
    assert "rank 1 (on north) has NCCL unknown" in sentences(FACTS, replace(FACTS, versions={"torch": "2.13.0"}))[0]


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (replace(FACTS, n_processors=1), "north has 1 processor for 2 ranks. ranks wait for each other's turn"),
        (replace(FACTS, n_gpus=1), "north has 1 GPU for 2 ranks, so all ranks train on its processors. start 1 rank"),
        (replace(FACTS, device="H200", n_gpus=2), "north: 2 ranks, each with a GPU of its own (H200)"),
    ],
)
def test_hosts_with_too_few_devices_are_named(facts: RankFacts, sentence: str) -> None:
    assert sentence in sentences(facts, facts)[1]


def test_ranks_on_different_devices_are_warned_of() -> None:
    assert (
        "the ranks train on different devices: H200, processor" in sentences(FACTS, replace(FACTS, device="H200"))[-1]
    )


def test_this_rank_says_what_it_runs() -> None:
    own = facts_of_this_rank(CPU)
    assert own.versions["torch"] == torch.__version__
    assert own.versions.keys() == {"umbel", "Python", "torch", "CUDA", "NCCL", "GPU driver"}
    assert own.n_processors >= 1


def planted(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Rank 1 has another Python than the others."""
    if dist.get_rank(group) == 1:
        platform.python_version = lambda: "3.99.0"
    mine = Group(dist.get_rank(group), dist.get_world_size(group), CPU, group)
    found = [str(one) for one in findings_of(facts_of_all(mine))]
    return {"found": torch.tensor(list(json.dumps(found).encode()))}


@pytest.mark.slow
def test_every_rank_of_a_real_group_names_a_planted_mismatch(tmp_path: Path) -> None:
    for one in in_ranks(f"{HERE}:planted", 3, tmp_path):
        found = json.loads(bytes(one["found"].tolist()))
        assert found[0].startswith("versions: wrong: rank 1 (on ")
        assert "has Python 3.99.0, but rank 0 (on " in found[0]
        assert f"and 1 other rank have {platform.python_version()}. install the same Python" in found[0]
