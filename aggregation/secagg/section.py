"""What the run file's [secure_aggregation] says, checked; and what else of a run file cannot go with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from umbel.aggregation.codec.combinations import Adding, require_summable
from umbel.aggregation.codec.section import CodecSection
from umbel.aggregation.codec.step import RoundShown
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.codec import Codec, CodecPlan
from umbel.aggregation.plans.grid import TOTAL_WEIGHT_MAX
from umbel.aggregation.plans.masks import MINIMUM_LEAST, SecurePlan, SumShown
from umbel.aggregation.plans.round import RoundPlan, Weighting
from umbel.aggregation.secagg.numbers.plan import FIRST_RMS, first_plans, secure_plan_after
from umbel.aggregation.secagg.numbers.work_floor import require_floor, usual_floor
from umbel.aggregation.secagg.parameters import COMPLETE_MAX, DEFAULT_RULE, threshold_complete
from umbel.aggregation.trust.fingerprint import members_sha256_of
from umbel.aggregation.types import COHORT_MAX, SAMPLE_COUNT_MAX, require_metric_names, require_within

if TYPE_CHECKING:
    from umbel.aggregation.run.file import RunFile

_NAMES = ("loss", "accuracy")  # what the ready trainer measures


@dataclass(frozen=True, slots=True)
class SecureAggregationSection:
    """Whether updates are masked, so that the coordinator learns their sum alone, and what is added up beside them.

    `metrics`, `evaluation`: names of what clients measure in training and on held-out data; a client that lacks one
    leaves it out. `expected_sample_count`: of a usual client, for the first round's step (`plan.py`); be it ten times
    too large or too small. `members_sha256`: of the member list that the clients pin, given in groups or not; empty
    without one. `minimum_work`: the least share of its planned steps that a client must have done to send its update;
    None for all of them, or one step where there is noise (`work_floor.py`).
    """

    enabled: bool = True
    metrics: tuple[str, ...] = _NAMES
    evaluation: tuple[str, ...] = _NAMES
    expected_sample_count: int = 128
    members_sha256: str = ""
    minimum_work: float | None = None
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - an unknown key is a typing error, so refuse it

    def __post_init__(self) -> None:
        for names in (self.metrics, self.evaluation):
            require_metric_names(names)
        require_within(self.expected_sample_count, "expected_sample_count", 1, SAMPLE_COUNT_MAX)
        if self.members_sha256:
            object.__setattr__(self, "members_sha256", members_sha256_of(self.members_sha256))
        if self.minimum_work is not None:
            require_floor(self.minimum_work, "minimum_work")

    def work_floor(self, *, has_noise: bool) -> float:
        """The least share of its planned steps that a client must have done. `has_noise`: of a run with [privacy]."""
        return usual_floor(has_noise=has_noise) if self.minimum_work is None else self.minimum_work

    def first(self, codec: CodecSection, plan: RoundPlan, n_values: int, key: int) -> tuple[CodecPlan, SecurePlan]:
        """The numbers of a run's first round, which has this plan. `n_values`: of the model."""
        is_proportional = plan.weighting is Weighting.PROPORTIONAL
        return first_plans(
            replace(codec, step=1.0).first(n_values, key),
            weight_unit=1 if is_proportional else self.expected_sample_count,
            clients_max=plan.n_wanted,
            minimum=plan.minimum,
            is_proportional=is_proportional,
            metrics=self.metrics,
            evaluation=self.evaluation,
            minimum_work=self.work_floor(has_noise=False),
        )

    def after(
        self,
        codec: CodecSection,
        before: tuple[CodecPlan, SecurePlan],
        plan: RoundPlan,
        shown: SumShown,
        key: int,
    ) -> tuple[CodecPlan, SecurePlan]:
        """The numbers of the round with this plan. `before`: those of the round of training before it, and `shown` what
        that has shown.

        The step grows fourfold at most, after the first round from the step at which the expected update would have
        been rounded: the first one was finer on purpose.
        """
        last = before[0]
        if plan.number == 2 and shown.update_rms:
            last = last.at_step(_step_of(codec) * FIRST_RMS / last.inverse_step)
        following = codec.after(last, plan.number, RoundShown(plan.window_s, 0, shown.update_rms), key)
        secure = secure_plan_after(before[1], following, shown, clients_max=plan.n_wanted, minimum=plan.minimum)
        return following, secure


def survivors_needed(n_clients: int) -> int:
    """How many of these must send their masked vectors, so that a sum of them is unmasked; see `parameters.py`."""
    return threshold_complete(n_clients) if n_clients <= COMPLETE_MAX else DEFAULT_RULE.survivors_min(n_clients)


def require_compatible(section: SecureAggregationSection, file: RunFile) -> None:
    """Raise `ValueError`, with why and what to do, for a run file in which something cannot go with masked updates."""
    if not section.enabled:
        return
    _require_codec(file.codec)
    for reason in _reasons(section, file):
        raise ValueError(reason)
    for number in _rounds_of_change(file):
        for reason in _reasons_of_round(file, number):
            raise ValueError(reason if number == 1 else f"with its overrides, round {number}: {reason}")


def _step_of(codec: CodecSection) -> float:
    """The integer codec's step, in root mean squares of an update."""
    return 1 / replace(codec, first_norm=1.0, clip_norm=None).first(1, 0).inverse_step


def _require_codec(section: CodecSection) -> None:
    plan = section.first(1, 0)
    if plan.codec is Codec.INTEGER:
        if section.name == "auto":
            raise ValueError(
                'name = "auto" finds its step by how short entropy coding makes an update, and masked integers all '
                'have one length: in [codec] set name = "integer" and a step for secure aggregation'
            )
        return
    try:
        require_summable(plan, Adding.SECURE)
    except ValueError as error:
        raise ValueError(f'{error}: in [codec] set name = "integer"') from error
    raise ValueError(
        f"{section.name} could be added up under masks, but only the integer codec is: in [codec] set "
        'name = "integer" for secure aggregation'
    )


def _reasons(section: SecureAggregationSection, file: RunFile) -> Iterator[str]:
    """What of the whole run cannot go with secure aggregation."""
    if file.canary is not None:
        yield "a canary looks at single updates, and secure aggregation hides them: leave [canary] out"
    if file.rounds.weighting is Weighting.PROPORTIONAL:
        yield (
            "how often each client was drawn is the coordinator's word, which no client can check under masks, and by "
            'it one client could be given all the weight: set weighting = "samples" in [rounds] for secure aggregation'
        )
    if file.evaluation is not None:
        yield (
            "rounds of evaluation report each client's metrics in the clear, which secure aggregation is to hide: "
            "leave [evaluation] out, and set evaluate = true in [training]"
        )
    if file.retention.updates != "none":
        yield (
            "a masked update says nothing once its round is over, so it is not kept: set updates = "
            '"none" in [retention] for secure aggregation'
        )
    if file.coverage.samples:
        yield (
            "a share of the samples can only be asked for where the coordinator knows each client's count, which "
            "secure aggregation hides: leave samples out of [coverage], and name sites or tiers"
        )
    if file.rounds.self_tuning:
        yield (
            "self-tuning asks up to three times the target, and secure aggregation needs more than two thirds of those "
            "asked: set self_tuning = false"
        )
    if section.expected_sample_count > file.aggregation.sample_count_max:
        yield (
            f"no client may have expected_sample_count = {section.expected_sample_count} samples: sample_count_max is "
            f"{file.aggregation.sample_count_max}"
        )
    yield from _reasons_of_stop(section, file)


def _reasons_of_stop(section: SecureAggregationSection, file: RunFile) -> Iterator[str]:
    if file.stop is None:
        return
    name = file.stop.metric.partition(".")[2]
    where, names = ("evaluation", section.evaluation) if file.stop.is_of_evaluation else ("metrics", section.metrics)
    if name not in names:
        yield f"{file.stop.metric} is not added up: name {name!r} in {where} of [secure_aggregation]"
    if file.stop.minimum >= MINIMUM_LEAST:
        yield (
            f"that no single client can move {file.stop.metric} takes a look at each client's value, which secure "
            "aggregation hides: leave [stop] out, or set minimum = 1 there if you trust each client not to end the run"
        )


def _reasons_of_round(file: RunFile, number: int) -> Iterator[str]:
    """What of one round cannot."""
    plan = file.round_plan(number, 1)
    if plan.minimum < MINIMUM_LEAST:
        yield (
            f"a sum of {counted(plan.minimum, 'client')} hides nobody: set minimum = "
            f"{MINIMUM_LEAST} or more in [rounds] for secure aggregation"
        )
    if plan.n_wanted > COHORT_MAX:
        yield f"one secure sum has {COHORT_MAX} clients at most, and {plan.n_wanted} are asked; lower target"
    if (needed := survivors_needed(plan.n_wanted)) > plan.target:
        most = next(n for n in range(plan.n_wanted, 0, -1) if survivors_needed(n) <= plan.target)
        yield (
            f"of {plan.n_wanted} clients that are asked secure aggregation needs {needed}, more than the target of "
            f"{plan.target}: set over_selection = {math.floor(100 * most / plan.target) / 100:g} or less"
        )
    if plan.n_wanted * plan.sample_count_max > TOTAL_WEIGHT_MAX:
        yield (
            f"{plan.n_wanted} clients of up to {plan.sample_count_max} samples could count more than 2^38, which "
            "masked sums have no room for: lower sample_count_max or target"
        )


def _rounds_of_change(file: RunFile) -> list[int]:
    """The first round of each stretch for which the same overrides hold."""
    firsts = {override.first_round for override in file.override}
    nexts = {override.last_round + 1 for override in file.override if override.last_round is not None}
    return sorted(number for number in {1} | firsts | nexts if number <= file.rounds.count)
