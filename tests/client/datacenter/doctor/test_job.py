"""Three jobs with a known bottleneck, in a real group: each is named, and so is what would help."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from tests.aggregation.collective.ranks import in_ranks
from tests.client.datacenter.doctor import jobs
from umbel.aggregation.run.file import RunFile
from umbel.client.datacenter.doctor.advice import Advice, StepTimes
from umbel.client.datacenter.doctor.facts import RankFacts
from umbel.client.datacenter.doctor.job import JobCheck, finding_of_failure, findings_of, measured_job
from umbel.client.datacenter.doctor.rounds import RoundAdvice
from umbel.client.datacenter.doctor.steps import NotTimed, StepMemory
from umbel.client.datacenter.ranks.group import Group

HERE = "tests.client.datacenter.doctor.test_job"
KINDS = ("input", "compute", "communication")
FILE = TypeAdapter(RunFile).validate_python(tomllib.loads(jobs.RUN_FILE))
FACTS = [RankFacts(host, {}, "processor", 0, 2) for host in ("north", "south")]


def measured(group: dist.ProcessGroup) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine, found = Group(rank, size, torch.device("cpu"), group), dict[str, Any]()
    for kind in KINDS:
        app = getattr(jobs, f"make_{kind}_bound")(rank, size)
        job = measured_job(mine, FILE, app, 2, budget_s=0.2)
        found[kind] = {
            "bound": job.steps.bound,
            "parts": dict(job.steps.parts),
            "every": 0 if job.advice is None else job.advice.every,
            "measured": job.measured_utilisation,
            "memory": [job.memory.parameters, job.memory.gradients, job.memory.optimizer],
            "rounds": job.rounds.measured if isinstance(job.rounds, RoundAdvice) else job.rounds,
            "said": [str(one) for one in findings_of(job, FACTS)],
        }
    try:
        measured_job(mine, FILE, jobs.make_deaf(rank, size), 2)
    except NotTimed as error:
        found["deaf"] = str(finding_of_failure(error))
    try:
        measured_job(mine, FILE, jobs.make_failing_at_rank_1(rank, size), 2)
    except NotTimed as error:
        found["failing"] = str(finding_of_failure(error))
    return {"found": torch.tensor(list(json.dumps(found).encode()))}


@pytest.mark.slow
def test_the_bottleneck_of_three_jobs_is_named(tmp_path: Path) -> None:
    by_rank = [json.loads(bytes(one["found"].tolist())) for one in in_ranks(f"{HERE}:measured", 2, tmp_path)]
    for kind in KINDS:
        for one in by_rank:
            assert one[kind]["bound"] == kind, one[kind]
            assert one[kind]["parts"] == by_rank[0][kind]["parts"], "all ranks say the same"
            assert any(
                said.startswith(f"bottleneck: {'pass' if kind == 'compute' else 'warning'}: {kind}-bound")
                for said in one[kind]["said"]
            )
    first = by_rank[0]
    assert first["communication"]["every"] > 10 * first["compute"]["every"]
    assert first["compute"]["measured"] > 0.5
    assert first["compute"]["rounds"] > 0.3, "a round of umbel train"
    small = 4 * (4 * 2 + 2)
    assert first["input"]["memory"] == [small, small, 0]
    assert first["communication"]["memory"] == [small + 4 * jobs.N_SENT, small, 0]
    for one in by_rank:
        assert one["deaf"].startswith(
            "job: wrong: rank 0: its client was asked for 5 steps, and asked its plan 0 times"
        )
        assert one["failing"].startswith("job: wrong: rank 1: the client's own code failed with RuntimeError: CUDA out")
        assert one["failing"].endswith("take smaller batches, accumulate gradients, or shard the model")


def job_of(**changes: Any) -> JobCheck:
    usual: dict[str, Any] = {
        "n_values": 1000,
        "steps": StepTimes(1.0, 0.5, 0.4),
        "alone_s": (0.5, 0.4),
        "sums": {"float32": 0.5, "8bit": 0.2},
        "wait_s": 0.1,
        "advice": Advice(6, "8bit", 0.9),
        "measured_utilisation": 0.88,
        "rounds": RoundAdvice(0.9, 18, 0.91, 0.87),
        "memory": StepMemory(4000, 4000, 8000),
        "device_bytes": 10**9,
    }
    return JobCheck(**{**usual, **changes})


def said(**changes: Any) -> dict[str, str]:
    return {one.check: f"{one.verdict}: {one.found}" for one in findings_of(job_of(**changes), FACTS)}


def test_predicted_and_measured_stand_side_by_side_with_what_to_write() -> None:
    found = said()
    assert found["advice"] == (
        "pass: every = 6 with 8bit: predicted 90% of the time in compute, measured 88%: "
        'outer_sync(..., every=6, codec="8bit")'
    )
    assert found["bottleneck"] == (
        "warning: communication-bound: 50% communication, 10% input, 40% compute; a step with a sum takes 1 s, without "
        "500 ms, and with one repeated batch 400 ms"
    )
    assert found["umbel train"] == (
        "pass: a round takes 900 ms beside its steps; with local_steps = 18 predicted 91% of the time in compute, "
        "measured 87%"
    )
    assert said(rounds="target is 4")["umbel train"].endswith("cannot carry out this run file: target is 4")
    assert "slow rank" not in found
    assert 'comm_hook(ddp, codec="8bit")' in said(advice=Advice(1, "8bit", 0.95))["advice"]
    assert "plain data parallelism" in said(advice=Advice(1, "float32", 0.95))["advice"]


def test_advice_that_did_not_come_true_is_a_warning() -> None:
    assert said(measured_utilisation=0.5)["advice"].startswith("warning: every = 6 with 8bit: predicted 90%")
    assert "not tried, because one round takes longer than 60 s" in said(measured_utilisation=None)["advice"]


def test_a_slow_rank_is_named() -> None:
    assert said(alone_s=(0.1, 0.9))["slow rank"] == (
        "warning: a step of rank 1 (on south) takes 900 ms, and the median is 500 ms"
    )


def test_one_rank_gets_no_advice_on_sums() -> None:
    assert said(advice=None).keys() == {"memory", "bottleneck"}
    assert (
        "is unknown (only a TorchClient can be given other data)" in said(steps=StepTimes(1.0, 0.9, None))["bottleneck"]
    )
