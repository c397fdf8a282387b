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
from umbel.client.datacenter.doctor.advice import Advice, RefutedAdvice, StepTimes
from umbel.client.datacenter.doctor.facts import RankFacts
from umbel.client.datacenter.doctor.job import JobCheck, finding_of_failure, findings_of, measured_job
from umbel.client.datacenter.doctor.layers import LayerCost
from umbel.client.datacenter.doctor.rounds import RefutedSteps, RoundAdvice
from umbel.client.datacenter.doctor.stages import divided
from umbel.client.datacenter.doctor.steps import NotTimed, StepMemory
from umbel.client.datacenter.ranks.group import Group
from umbel.client.findings import ClientFinding

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
            "stages": job.stages,
            "said": [str(one) for one in findings_of(job, FACTS)],
        }
    return _as_tensor(found)


def not_timed(group: dist.ProcessGroup) -> dict[str, Tensor]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine, found = Group(rank, size, torch.device("cpu"), group), dict[str, str]()
    for kind in ("deaf", "failing_at_rank_1"):
        try:
            measured_job(mine, FILE, getattr(jobs, f"make_{kind}")(rank, size), 2)
        except NotTimed as error:
            found[kind] = str(finding_of_failure(error))
    return _as_tensor(found)


def _as_tensor(found: dict[str, Any]) -> dict[str, Tensor]:
    return {"found": torch.tensor(list(json.dumps(found).encode()))}


def said_by_rank(work: str, folder: Path) -> list[dict[str, Any]]:
    return [json.loads(bytes(one["found"].tolist())) for one in in_ranks(f"{HERE}:{work}", 2, folder)]


@pytest.mark.realtime
def test_the_bottleneck_of_three_jobs_is_named(tmp_path: Path) -> None:
    by_rank = said_by_rank("measured", tmp_path)
    for kind in KINDS:
        for one in by_rank:
            assert one[kind]["bound"] == kind, one[kind]
            assert one[kind]["parts"] == by_rank[0][kind]["parts"], "all ranks say the same"
            assert any(
                said.startswith(f"bottleneck: {'pass' if kind == 'compute' else 'warning'}: {kind}-bound")
                for said in one[kind]["said"]
            )
    first = by_rank[0]
    assert first["compute"]["stages"] == "the model has only 1 layer for 2 pipeline stages"
    assert first["communication"]["every"] > 10 * first["compute"]["every"]
    assert first["compute"]["measured"] > 0.5
    assert first["compute"]["rounds"] > 0.3, "a round of umbel train"
    small = 4 * (4 * 2 + 2)
    assert first["input"]["memory"] == [small, small, 0]
    assert first["communication"]["memory"] == [small + 4 * jobs.N_SENT, small, 0]


@pytest.mark.slow
def test_clients_whose_steps_cannot_be_timed_are_named_on_every_rank(tmp_path: Path) -> None:
    for one in said_by_rank("not_timed", tmp_path):
        assert one["deaf"].startswith(
            "job: wrong: rank 0: its client was asked for 5 steps, and asked its plan 0 times"
        )
        failing = one["failing_at_rank_1"]
        assert failing.startswith("job: wrong: rank 1: the client's own code failed with RuntimeError: CUDA out")
        assert failing.endswith("take smaller batches, accumulate gradients, or shard the model")


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
        "stages": "the model has only 1 layer for 2 pipeline stages",
    }
    return JobCheck(**{**usual, **changes})


def findings(**changes: Any) -> dict[str, ClientFinding]:
    return {one.check: one for one in findings_of(job_of(**changes), FACTS)}


def said(**changes: Any) -> dict[str, str]:
    return {check: f"{one.verdict}: {one.found}" for check, one in findings(**changes).items()}


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


def test_advice_that_a_trial_refutes_is_not_given_as_what_to_write() -> None:
    short = findings(measured_utilisation=0.5)["advice"]
    assert short.found == (
        "every = 6 with 8bit: predicted 90% of the time in compute, but measured only 50%, which is 40 points less"
    )
    # 6 steps of 0.5 s and a sum took 6 s, so a sum took 3 s, 2.7 s longer than predicted. One in 4 bits or fewer
    # was not measured here, and one of float32 would take 3.3 s: 9 x 3.3 / 0.5.
    assert short.advice.startswith("by this measurement, take every = 60 with float32, or more steps. If that falls")
    again = findings(refuted=(RefutedAdvice(Advice(6, "8bit", 0.9), 0.5),), advice=Advice(60, "float32", 0.9))["advice"]
    assert (again.verdict, again.advice) == ("pass", "")
    assert again.found == (
        "every = 60 with float32: predicted 90% of the time in compute, measured 88%: "
        'outer_sync(..., every=60, codec="float32"). every = 6 with 8bit was tried before, and reached only 50%'
    )


def test_where_more_steps_did_not_help_no_more_are_advised() -> None:
    steps = findings(rounds=RoundAdvice(1.0, 18, 0.9, 0.5, (RefutedSteps(9, 0.9, 0.5),)))["umbel train"]
    twice = {"refuted": (RefutedAdvice(Advice(6, "8bit", 0.9), 0.5),), "advice": Advice(60, "8bit", 0.9)}
    for one in (steps, findings(**twice, measured_utilisation=0.45)["advice"]):
        assert (one.verdict, one.advice[:48]) == ("warning", "more steps between two sums did not help, so the")
    assert findings(**twice, measured_utilisation=0.6)["advice"].advice.startswith("by this measurement, take every")


def test_what_follows_from_refuted_advice_but_takes_too_long_to_try_is_a_remedy_alone() -> None:
    refuted = (RefutedAdvice(Advice(6, "8bit", 0.9), 0.5),)
    found = findings(refuted=refuted, advice=Advice(60, "float32", 0.9), measured_utilisation=None)["advice"]
    assert found.verdict == "warning"
    assert found.found.endswith("but measured only 50%, which is 40 points less")
    assert found.advice == ("take every = 60 with float32: one such round takes longer than 60 s, so it was not tried")


def test_local_steps_that_a_trial_refutes_are_a_warning_with_the_number_that_the_trial_supports() -> None:
    short = findings(rounds=RoundAdvice(1.0, 18, 0.9, 0.5, (RefutedSteps(9, 0.9, 0.4),)))["umbel train"]
    assert short.found == (
        "a round takes 1 s beside its steps; with local_steps = 18 predicted 90% of the time in compute, but measured "
        "only 50%, which is 40 points less. local_steps = 9 was tried before, and reached only 40%"
    )
    assert short.advice.startswith(
        "by this measurement, set local_steps = 162 or more in [training], or choose a codec"
    )
    untried = findings(rounds=RoundAdvice(1.0, 18, 0.9, None, (RefutedSteps(9, 0.9, 0.4),)))["umbel train"]
    assert untried.verdict == "warning"
    assert "not tried. local_steps = 9 was tried before, and reached only 40%" in untried.found
    assert said(rounds=RoundAdvice(1.0, 18, 0.9, None))["umbel train"].endswith("of the time in compute, not tried")


def test_a_slow_rank_is_named() -> None:
    assert said(alone_s=(0.1, 0.9))["slow rank"] == (
        "warning: a step of rank 1 (on south) takes 900 ms, and the median is 500 ms"
    )


def test_of_clients_of_several_ranks_what_cannot_be_said_is_skipped_with_the_reason() -> None:
    usual = {"ranks_per_client": 2, "advice": None, "measured_utilisation": None}
    found = findings(**usual)
    assert found["advice"].verdict == "skipped"
    assert "outer_sync adds up over all ranks of a job: see the local_steps of umbel train" in found["advice"].found
    assert found["bottleneck"].advice == "add up less often, or in fewer bits; see umbel train"
    assert found["umbel train"].verdict == "pass"
    assert found["memory"].found.endswith("for a rank: it fits as the 2 ranks of a client divide it")
    small = findings(**usual, device_bytes=8800)
    assert small["memory"].advice.startswith(
        "shard the model over the client's ranks (FSDP2), give a client more ranks"
    )
    assert (small["stages"].verdict, small["stages"].found.split(":")[0]) == (
        "skipped",
        "a division into pipeline stages is computed for clients of one rank only",
    )


def test_a_slow_client_is_named_with_its_first_rank() -> None:
    facts = [RankFacts(host, {}, "processor", 0, 2) for host in ("north", "north", "south", "south")]
    (slow,) = [one for one in findings_of(job_of(alone_s=(0.1, 0.9), ranks_per_client=2), facts) if "slow" in one.check]
    assert (slow.check, slow.found) == (
        "slow client",
        "a step of client 1 (its first rank is rank 2 (on south)) takes 900 ms, and the median is 500 ms",
    )


def test_how_to_divide_the_model_is_said_where_stages_are_advised() -> None:
    assert "stages" not in said()
    large = said(device_bytes=8800, stages=divided([LayerCost("a", 8, 2000), LayerCost("b", 8, 2000)], 2, 64))
    assert large["memory"].startswith("wrong: ")
    assert large["stages"].startswith("pass: 2 pipeline stages: a | b; the slowest has 1.00 x the mean work")
    assert said(device_bytes=8800)["stages"] == "warning: the model has only 1 layer for 2 pipeline stages"


def test_one_rank_gets_no_advice_on_sums() -> None:
    assert said(advice=None).keys() == {"memory", "bottleneck"}
    assert (
        "is unknown (only a TorchClient can be given other data)" in said(steps=StepTimes(1.0, 0.9, None))["bottleneck"]
    )
