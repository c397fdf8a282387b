"""What in a run file cannot go together, in words: with secure aggregation, with [privacy], and with a member list."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from umbel.aggregation.codec.section import CodecSection, why_not_summable
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.codec import Codec
from umbel.aggregation.plans.grid import TOTAL_WEIGHT_MAX
from umbel.aggregation.plans.masks import MINIMUM_LEAST
from umbel.aggregation.plans.round import Weighting
from umbel.aggregation.privacy.section import PrivacySection
from umbel.aggregation.secagg.section import SecureAggregationSection, survivors_needed
from umbel.aggregation.trust.members import MemberList, MembersRefused
from umbel.aggregation.trust.public_keys import short_groups
from umbel.aggregation.types import COHORT_MAX

if TYPE_CHECKING:  # the run file's constructor applies these rules
    from umbel.aggregation.run.file import RunFile


class AnotherList(MembersRefused):
    """A list that is not the run's; `str(error)` has the line that the run file needs for it."""


def require_named(file: RunFile, members: MemberList) -> None:
    """Raise `AnotherList` unless this is the list that the run file names."""
    if (named := file.members_sha256) == members.sha256:
        return
    given, line = members.words, f'members_sha256 = "{members.sha256}"'
    if not file.secure:
        raise AnotherList(
            f"a member list is for secure rounds, and the run file asks for none: for {given} write {line} into a "
            "section [secure_aggregation], or give no list"
        )
    if not named:
        raise AnotherList(f"the run file names no member list: for {given} write {line} into its [secure_aggregation]")
    raise AnotherList(
        f"the run file names another member list ({short_groups(named)}) than {given}: give the one that it names, or "
        f"write {line} into its [secure_aggregation]"
    )


def require_compatible(section: SecureAggregationSection, file: RunFile) -> None:
    """Raise `ValueError`, with the reason and a remedy, for a run file that masked updates do not allow."""
    if not section.enabled:
        return
    _require_codec(file.codec)
    for reason in _secure_reasons(section, file):
        raise ValueError(reason)
    for number in file.rounds_of_change():
        for reason in _reasons_of_round(file, number):
            raise ValueError(reason if number == 1 else f"with its overrides, round {number}: {reason}")


def _require_codec(section: CodecSection) -> None:
    plan = section.first(1, 0)
    if plan.codec is Codec.INTEGER:
        if section.name == "auto":
            raise ValueError(
                'name = "auto" finds its step by how short entropy coding makes an update, and masked integers all '
                'have one length: in [codec] set name = "integer" and a step for secure aggregation'
            )
        return
    if why := why_not_summable(plan):
        raise ValueError(
            f'{section.name} does not work with secure aggregation: {why}; in [codec] set name = "integer"'
        )
    raise ValueError(
        f"{section.name} could be added up under masks, but only the integer codec is: in [codec] set "
        'name = "integer" for secure aggregation'
    )


def _secure_reasons(section: SecureAggregationSection, file: RunFile) -> Iterator[str]:
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


def require_private(section: PrivacySection, file: RunFile) -> None:
    """Raise `ValueError`, with the reason and a remedy, for a run file that private rounds do not allow."""
    for reason in _private_reasons(section, file):
        raise ValueError(reason)


def _private_reasons(section: PrivacySection, file: RunFile) -> Iterator[str]:
    if not file.secure:
        yield "the noise that each client adds protects it only where updates are masked: add [secure_aggregation]"
        return
    section.clip(file.codec.clip_norm)
    if file.rounds.weighting is Weighting.PROPORTIONAL:
        yield (
            "a client that is drawn twice would count twice, and the noise hides only one share: set "
            'weighting = "samples" in [rounds]; in private rounds all clients count the same'
        )
    if file.training.evaluate or file.stop is not None or any(one.evaluate for one in file.override):
        yield (
            "metrics would be summed without noise: leave out [stop] and evaluate, and measure the models of a private "
            "run on data that is not the clients'"
        )
    if any(one.target or one.minimum or one.over_selection for one in file.override):
        yield (
            "the noise is planned for one size of cohort: leave out target, minimum and over_selection in the overrides"
        )
