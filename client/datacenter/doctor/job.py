"""A user's own job: what limits its steps, whether it fits into memory, and which `every` and codec suit it.

The steps are those of this rank's client. They are timed with a sum of float32 after each, without a sum, and with one
repeated batch. Then the advice is tried: some rounds of that many steps, and a sum with that codec.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from pydantic import TypeAdapter

from umbel.aggregation.collective.mean import Mean
from umbel.aggregation.run.file import RunFile
from umbel.client.app import Client
from umbel.client.datacenter.doctor.advice import CODECS, Advice, StepTimes, advised
from umbel.client.datacenter.doctor.facts import RankFacts, named
from umbel.client.datacenter.doctor.links import seconds
from umbel.client.datacenter.doctor.memory import findings_of_memory, memory_bytes
from umbel.client.datacenter.doctor.rounds import RoundAdvice, advised_rounds
from umbel.client.datacenter.doctor.steps import NotTimed, StepMemory, StepTimer
from umbel.client.datacenter.doctor.timing import agreed_time, time_of
from umbel.client.datacenter.loops.attach import CodecName, mean_of
from umbel.client.datacenter.ranks.group import Group
from umbel.client.datacenter.ranks.torch_errors import cause_of
from umbel.client.findings import ClientFinding, passed, skipped, warned, wrong

_BUDGET_S = 4.0
_OF_SUMS, _OF_ROUNDS = 0.4, 5.0  # of that budget
_ROUNDS, _ROUND_S_MAX = range(2, 6), 60.0  # how many, and how long one may be
_ALONE = "there is only one rank"
_STRAGGLER = 1.5  # times the median step
_FLOATS = TypeAdapter(list[float])


@dataclass(frozen=True, slots=True)
class JobCheck:
    """What was measured of a job.

    `alone_s`: seconds of a step without a sum, of each rank. `sums`: of a mean of the model's change, by codec.
    `wait_s`: what a sum takes longer after steps than by itself, because ranks wait for each other.
    `measured_utilisation` None: a round as advised would take too long to try. `rounds`: of `umbel train`, or why these
    ranks cannot carry out the run file.
    """

    n_values: int
    steps: StepTimes
    alone_s: tuple[float, ...]
    sums: Mapping[CodecName, float]
    wait_s: float
    advice: Advice | None  # None for one rank
    measured_utilisation: float | None
    rounds: RoundAdvice | str
    memory: StepMemory
    device_bytes: int


def measured_job(group: Group, file: RunFile, app: Client, n_on_host: int, *, budget_s: float = _BUDGET_S) -> JobCheck:
    """Time this rank's client, together with those of all ranks.

    `n_on_host`: ranks that share its memory. `budget_s`: about so long the steps of each kind may take. Raises
    `NotTimed` for a client that fails, or does not follow its plan.
    """
    timer = StepTimer(group, file, app)
    about_s, memory = timer.probe()
    values = torch.randn(timer.n_values, device=group.wire)
    float32 = mean_of("float32", group.process_group)
    own_s = timer.step_s(about_s, budget_s)
    alone_s = agreed_time(group, own_s)
    sums: dict[CodecName, float] = {
        codec: _mean_s(group, mean_of(codec, group.process_group), values, _OF_SUMS * budget_s) for codec in CODECS
    }
    each_s = about_s + sums["float32"]
    normal_s = timer.step_s(each_s, budget_s, work=lambda: float32.mean(values, 0))
    synthetic_s = timer.synthetic_step_s(about_s, budget_s)
    times = StepTimes(
        agreed_time(group, normal_s), alone_s, None if synthetic_s is None else agreed_time(group, synthetic_s)
    )
    wait_s = max(0.0, times.normal_s - alone_s - sums["float32"])
    with_wait: dict[CodecName, float] = {codec: took + wait_s for codec, took in sums.items()}
    advice = advised(alone_s, with_wait) if group.size > 1 else None
    rounds: RoundAdvice | str = _ALONE
    if advice is not None:
        about_s = 2 * sums["float32"] + wait_s  # integers of 64 bits
        rounds = advised_rounds(group, file, app, alone_s, about_s, _OF_ROUNDS * budget_s)
    return JobCheck(
        n_values=timer.n_values,
        steps=times,
        alone_s=tuple(own for one in group.gather(_FLOATS.dump_json([own_s])) for own in _FLOATS.validate_json(one)),
        sums=sums,
        wait_s=wait_s,
        advice=advice,
        measured_utilisation=None
        if advice is None
        else _tried(group, timer, advice, alone_s, values, _OF_ROUNDS * budget_s),
        rounds=rounds,
        memory=memory,
        device_bytes=memory_bytes(group.device, n_on_host),
    )


def finding_of_failure(error: NotTimed) -> ClientFinding:
    """Why a job could not be timed, and what to do."""
    return wrong("job", str(error), cause_of(error) or "correct the client; umbel client check tries it in one process")


def findings_of(job: JobCheck, facts: Sequence[RankFacts]) -> Iterator[ClientFinding]:
    """What limits the job, what would help, and whether it fits."""
    yield from findings_of_memory(job.memory, job.device_bytes, len(facts))
    yield from _stragglers(job, facts)
    yield _bottleneck(job)
    if job.advice is None:
        return
    shown = ", ".join(f"{codec} {seconds(took)}" for codec, took in job.sums.items())
    yield passed("codecs", f"a mean of {job.n_values:,} values takes {shown}")
    yield _advice(job, job.advice)
    yield _rounds(job.rounds)


def _bottleneck(job: JobCheck) -> ClientFinding:
    times, parts = job.steps, job.steps.parts
    said = f"a step with a sum takes {seconds(times.normal_s)}, without {seconds(times.alone_s)}, "
    if times.synthetic_s is None:
        said += "and with one repeated batch is unknown (only a TorchClient can be given other data)"
    else:
        said += f"and with one repeated batch {seconds(times.synthetic_s)}"
    shares = ", ".join(f"{share:.0%} {part}" for part, share in parts.items())
    said = f"{times.bound}-bound: {shares}; {said}"
    match times.bound:
        case "compute":
            return passed("bottleneck", said)
        case "communication":
            return warned("bottleneck", said, "add up less often, or in fewer bits; see advice")
        case "input":
            advice = "read faster: a DataLoader with more workers, prefetch, smaller files, or data in memory"
            return warned("bottleneck", said, advice)


def _advice(job: JobCheck, advice: Advice) -> ClientFinding:
    said = f"every = {advice.every} with {advice.codec}: predicted {advice.utilisation:.0%} of the time in compute, "
    use = f'outer_sync(..., every={advice.every}, codec="{advice.codec}")'
    if advice.every == 1:
        use = "plain data parallelism" if advice.codec == "float32" else f'comm_hook(ddp, codec="{advice.codec}")'
    if job.measured_utilisation is None:
        return passed("advice", f"{said}not tried, because one round takes longer than {seconds(_ROUND_S_MAX)}: {use}")
    said += f"measured {job.measured_utilisation:.0%}: {use}"
    if job.measured_utilisation < 0.8 * advice.utilisation:
        return warned("advice", said, "the ranks' steps take different times, or the network is shared: try again")
    return passed("advice", said)


def _rounds(found: RoundAdvice | str) -> ClientFinding:
    if isinstance(found, str):
        return skipped("umbel train", f"these ranks cannot carry out this run file: {found}")
    said = f"a round takes {seconds(found.cost_s)} beside its steps; with local_steps = {found.local_steps} "
    said += f"predicted {found.predicted:.0%} of the time in compute, "
    return passed("umbel train", said + (f"measured {found.measured:.0%}" if found.measured else "not tried"))


def _stragglers(job: JobCheck, facts: Sequence[RankFacts]) -> Iterator[ClientFinding]:
    usual = median(job.alone_s)
    for rank, own_s in enumerate(job.alone_s):
        if own_s > _STRAGGLER * usual:
            said = f"a step of {named(rank, facts)} takes {seconds(own_s)}, and the median is {seconds(usual)}"
            yield warned("slow rank", said, "all ranks wait for it: look at its processors, its GPU and its data")


def _tried(
    group: Group,
    timer: StepTimer,
    advice: Advice,
    alone_s: float,
    values: torch.Tensor,
    budget_s: float,
) -> float | None:
    """The share of compute in rounds as advised; None if one takes too long."""
    about_s = advice.every * alone_s / advice.utilisation
    if about_s > _ROUND_S_MAX:
        return None
    n_rounds = min(_ROUNDS[-1], max(_ROUNDS[0], int(budget_s / about_s)))
    mean = mean_of(advice.codec, group.process_group)
    round_s = agreed_time(group, timer.round_s(advice.every, n_rounds, lambda: mean.mean(values, 0)))
    return min(1.0, advice.every * alone_s / round_s)


def _mean_s(group: Group, mean: Mean, values: torch.Tensor, budget_s: float) -> float:
    return time_of(group, lambda: mean.mean(values, 0), budget_s)
