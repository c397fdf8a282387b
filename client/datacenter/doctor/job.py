"""A user's own job: what limits its steps, whether it fits into memory, and which `every` and codec suit it.

This rank's client makes the steps. They are timed with a sum of float32 after each, without a sum, and with one
repeated batch. Then the advice is tried: a few rounds, each with the advised steps and a sum with the advised codec.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from pydantic import TypeAdapter

from umbel.aggregation.collective.mean import Mean
from umbel.aggregation.run.file import RunFile
from umbel.client.app import Client
from umbel.client.datacenter.doctor.advice import (
    CODECS,
    Advice,
    RefutedAdvice,
    StepTimes,
    advised,
    advised_again,
    cost_of_sum,
    falls_short,
    least_every,
    rises,
)
from umbel.client.datacenter.doctor.facts import RankFacts, named
from umbel.client.datacenter.doctor.links import seconds
from umbel.client.datacenter.doctor.memory import findings_of_memory, memory_bytes
from umbel.client.datacenter.doctor.pipeline import division_of_model
from umbel.client.datacenter.doctor.rounds import RoundAdvice, advised_rounds
from umbel.client.datacenter.doctor.stages import PipelineStages, finding_of_division
from umbel.client.datacenter.doctor.steps import NotTimed, SeveralRanks, StepMemory, StepTimer
from umbel.client.datacenter.doctor.timing import agreed_time, time_of
from umbel.client.datacenter.loops.attach import CodecName, mean_of
from umbel.client.datacenter.ranks.group import Group
from umbel.client.datacenter.ranks.torch_errors import cause_of
from umbel.client.findings import ClientFinding, passed, skipped, warned, wrong

_BUDGET_S = 4.0
_OF_SUMS, _OF_ROUNDS = 0.4, 5.0  # of that budget
_ROUNDS, _ROUND_S_MAX = range(2, 6), 60.0  # how many, and how long one may be
_NO_STAGES = (
    "a division into pipeline stages is computed for clients of one rank only: start as many ranks as one client has, "
    "without --ranks-per-client"
)
_NO_ADVICE = (
    "every and codec are not advised for clients of several ranks, because outer_sync adds up over all ranks of a job: "
    "see the local_steps of umbel train"
)
_WHY_SHORT = "If that falls short too, the ranks' steps take different times, or others use the network"
_NO_HELP = (
    "more steps between two sums did not help, so the steps themselves take longer in such rounds than alone: see "
    "whether other programs use the processors, the GPUs or the network, and measure again"
)
_REFUTED_MAX = 1  # advice that is given up after a trial
_STRAGGLER = 1.5  # times the median step
_FLOATS = TypeAdapter(list[float])


@dataclass(frozen=True, slots=True)
class JobCheck:
    """The measurements of a job."""

    n_values: int  # of a sum of the model's changes
    steps: StepTimes
    alone_s: tuple[float, ...]  # seconds of a step without a sum, of each rank
    sums: Mapping[CodecName, float]  # seconds of a mean of the model's change, by codec
    wait_s: float  # seconds that a sum takes longer after steps, because ranks wait for each other
    advice: Advice | None  # the last one, if trials have refuted others; None for one rank, or clients of several ranks
    measured_utilisation: float | None  # of it; None: an advised round takes too long to try
    rounds: RoundAdvice | str  # of `umbel train`, or why these ranks cannot carry out the run file
    memory: StepMemory
    device_bytes: int  # of the memory of this rank
    stages: PipelineStages | str  # into which the model could be divided, or why it could not
    refuted: tuple[RefutedAdvice, ...] = ()  # what was tried before `advice`
    ranks_per_client: int = 1  # if there are more, a step is one of a whole client, and sums go over first ranks

    @property
    def sums_with_wait(self) -> dict[CodecName, float]:
        """Seconds of a mean after steps, by codec."""
        return _with_wait(self.sums, self.wait_s)


def measured_job(
    group: Group,
    file: RunFile,
    app: Client,
    n_on_host: int,
    several: SeveralRanks | None = None,
    *,
    budget_s: float = _BUDGET_S,
) -> JobCheck:
    """Time this rank's client, together with those of all ranks of the group.

    `n_on_host`: ranks that share the memory of this host. `several`: of clients of several ranks, whose first ranks are
    the group; `app` is then such a client as a whole. `budget_s`: about how long the steps of each kind may take.
    Raises `NotTimed` for a client that fails, or does not follow its plan.
    """
    timer = StepTimer(group, file, app, several)
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
    with_wait = _with_wait(sums, wait_s)
    advice, measured, refuted = None, None, tuple[RefutedAdvice, ...]()
    if group.size > 1 and several is None:
        advice, measured, refuted = _tried_advice(group, timer, alone_s, with_wait, values, _OF_ROUNDS * budget_s)
    rounds: RoundAdvice | str = f"there is only one {group.names.noun}"
    if group.size > 1:
        about_s = 2 * sums["float32"] + wait_s  # integers of 64 bits
        rounds = advised_rounds(group, file, app, alone_s, about_s, _OF_ROUNDS * budget_s)
    return JobCheck(
        n_values=timer.n_values,
        steps=times,
        alone_s=tuple(own for one in group.gather(_FLOATS.dump_json([own_s])) for own in _FLOATS.validate_json(one)),
        sums=sums,
        wait_s=wait_s,
        advice=advice,
        measured_utilisation=measured,
        rounds=rounds,
        memory=memory,
        device_bytes=memory_bytes(group.device, n_on_host),
        stages=division_of_model(group, timer) if several is None else _NO_STAGES,
        refuted=refuted,
        ranks_per_client=1 if several is None else several.n,
    )


def _with_wait(sums: Mapping[CodecName, float], wait_s: float) -> dict[CodecName, float]:
    return {codec: took + wait_s for codec, took in sums.items()}


def finding_of_failure(error: NotTimed) -> ClientFinding:
    """Why a job could not be timed, and what to do."""
    return wrong("job", str(error), cause_of(error) or "correct the client; umbel client check tries it in one process")


def findings_of(job: JobCheck, facts: Sequence[RankFacts]) -> Iterator[ClientFinding]:
    """What limits the job, what would help, and whether it fits."""
    memory = [*findings_of_memory(job.memory, job.device_bytes, len(facts), job.ranks_per_client)]
    yield from memory
    if any(one.verdict == "wrong" for one in memory) and len(facts) > 1:
        yield skipped("stages", _NO_STAGES) if job.ranks_per_client > 1 else finding_of_division(job.stages)
    yield from _stragglers(job, facts)
    yield _bottleneck(job)
    if len(job.alone_s) == 1 or (job.advice is None and job.ranks_per_client == 1):
        return
    shown = ", ".join(f"{codec} {seconds(took)}" for codec, took in job.sums.items())
    yield passed("codecs", f"a mean of {job.n_values:,} values takes {shown}")
    yield skipped("advice", _NO_ADVICE) if job.advice is None else _advice(job, job.advice)
    yield _rounds(job.rounds, job.steps.alone_s)


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
            where = "advice" if job.ranks_per_client == 1 else "umbel train"
            return warned("bottleneck", said, f"add up less often, or in fewer bits; see {where}")
        case "input":
            advice = "read faster: a DataLoader with more workers, prefetch, smaller files, or data in memory"
            return warned("bottleneck", said, advice)


def _advice(job: JobCheck, advice: Advice) -> ClientFinding:
    measured = job.measured_utilisation
    if measured is None and job.refuted:
        *before, last = job.refuted
        remedy = f"take {_named(advice)}: one such round takes longer than {seconds(_ROUND_S_MAX)}, so it was not tried"
        return warned("advice", _fell_short(last.advice, last.measured) + _before(before), remedy)
    if measured is None:
        not_tried = f"not tried, because one round takes longer than {seconds(_ROUND_S_MAX)}"
        return passed("advice", f"{_predicted(advice)}{not_tried}: {_use(advice)}")
    if falls_short(measured, advice.utilisation):
        following = advised_again(RefutedAdvice(advice, measured), job.steps.alone_s, job.sums_with_wait)
        remedy = f"by this measurement, take {_named(following)}, or more steps. {_WHY_SHORT}"
        if job.refuted and not rises(job.refuted[-1].measured, measured):
            remedy = _NO_HELP
        return warned("advice", _fell_short(advice, measured) + _before(job.refuted), remedy)
    return passed("advice", f"{_predicted(advice)}measured {measured:.0%}: {_use(advice)}{_before(job.refuted)}")


def _named(advice: Advice) -> str:
    return f"every = {advice.every} with {advice.codec}"


def _predicted(advice: Advice) -> str:
    return f"{_named(advice)}: predicted {advice.utilisation:.0%} of the time in compute, "


def _fell_short(advice: Advice, measured: float) -> str:
    return _predicted(advice) + _only(measured, advice.utilisation)


def _only(measured: float, predicted: float) -> str:
    return f"but measured only {measured:.0%}, which is {100 * (predicted - measured):.0f} points less"


def _before(refuted: Sequence[RefutedAdvice]) -> str:
    """What was tried before."""
    said = [f"{_named(one.advice)} was tried before, and reached only {one.measured:.0%}" for one in refuted]
    return "".join(f". {one}" for one in said)


def _use(advice: Advice) -> str:
    """What to write."""
    if advice.every > 1:
        return f'outer_sync(..., every={advice.every}, codec="{advice.codec}")'
    return "plain data parallelism" if advice.codec == "float32" else f'comm_hook(ddp, codec="{advice.codec}")'


def _rounds(found: RoundAdvice | str, step_s: float) -> ClientFinding:
    """`step_s`: of one step on the slowest rank."""
    if isinstance(found, str):
        return skipped("umbel train", f"these ranks cannot carry out this run file: {found}")
    before = "".join(
        f". local_steps = {one.local_steps} was tried before, and reached only {one.measured:.0%}"
        for one in found.refuted
    )
    said = f"a round takes {seconds(found.cost_s)} beside its steps; with local_steps = {found.local_steps} "
    said += f"predicted {found.predicted:.0%} of the time in compute, "
    if found.measured is None and not found.refuted:
        return passed("umbel train", f"{said}not tried")
    if found.measured is None:
        remedy = "set this number of local_steps in [training]: such a round takes too long to try it here"
        return warned("umbel train", f"{said}not tried{before}", remedy)
    if not falls_short(found.measured, found.predicted):
        return passed("umbel train", f"{said}measured {found.measured:.0%}{before}")
    cost_s = cost_of_sum(found.local_steps, step_s, found.measured)
    remedy = (
        f"by this measurement, set local_steps = {least_every(step_s, cost_s)} or more in [training], or choose a "
        f"codec with fewer bits. {_WHY_SHORT}"
    )
    if found.refuted and not rises(found.refuted[-1].measured, found.measured):
        remedy = _NO_HELP
    return warned("umbel train", said + _only(found.measured, found.predicted) + before, remedy)


def _stragglers(job: JobCheck, facts: Sequence[RankFacts]) -> Iterator[ClientFinding]:
    usual, n_each = median(job.alone_s), job.ranks_per_client
    for number, own_s in enumerate(job.alone_s):
        if own_s <= _STRAGGLER * usual:
            continue
        if n_each == 1:
            who, remedy = named(number, facts), "all ranks wait for it: look at its processors, its GPU and its data"
        else:
            who = f"client {number} (its first rank is {named(number * n_each, facts)})"
            remedy = "all clients wait for it: look at its ranks' processors, GPUs and data"
        said = f"a step of {who} takes {seconds(own_s)}, and the median is {seconds(usual)}"
        yield warned("slow rank" if n_each == 1 else "slow client", said, remedy)


def _tried_advice(
    group: Group,
    timer: StepTimer,
    alone_s: float,
    sums: Mapping[CodecName, float],
    values: torch.Tensor,
    budget_s: float,
) -> tuple[Advice, float | None, tuple[RefutedAdvice, ...]]:
    """The advice, its utilisation in a trial, and what trials have refuted before. The same on every rank."""
    advice, refuted = advised(alone_s, sums), list[RefutedAdvice]()
    while True:
        measured = _tried(group, timer, advice, alone_s, values, budget_s)
        if measured is None or not falls_short(measured, advice.utilisation) or len(refuted) == _REFUTED_MAX:
            return advice, measured, tuple(refuted)
        refuted.append(RefutedAdvice(advice, measured))
        advice = advised_again(refuted[-1], alone_s, sums)


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
