"""How much of a cohort's data is in, and which parts of the coverage floor are missing. Pure.

Sample counts are those that clients announced when they were drawn, capped at the run's `sample_count_max`, so that no
client can hold a round open with a false count.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from umbel.aggregation.phrases import agreeing, part_of, some
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.round.cohort import Member
from umbel.aggregation.types import ClientId

_ROUNDING = 1e-9  # a share of 0.3 of 10 samples is 3, whatever binary fractions say


@dataclass(frozen=True, slots=True)
class Gap:
    """A missing part of the floor."""

    kind: Literal["samples", "site", "tier"]
    name: str  # of the site or tier; empty for the share of all samples
    reason: str
    sample_count: int  # announced and missing there
    may_close: bool = False  # whether clients that could fill it may still report

    @property
    def what(self) -> str:
        return "the share of samples" if self.kind == "samples" else f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Samples:
    """Announced samples of a group of clients."""

    selected: int  # of all
    reported: int  # of those whose reports are in
    open: int  # of those that may still report

    @property
    def left_out(self) -> int:
        return self.selected - self.reported

    @property
    def share(self) -> float:
        """The share of the data that is in, 0 to 1; 0 if there is none."""
        return self.reported / self.selected if self.selected else 0.0

    def reaches(self, share: float) -> bool:
        return self.reported >= share * self.selected - _ROUNDING * self.selected

    def may_reach(self, share: float) -> bool:
        """Whether it would if all open clients reported."""
        return self.reported + self.open >= share * self.selected - _ROUNDING * self.selected


@dataclass(frozen=True, slots=True)
class Roll:
    """The attendance of a cohort; clients in neither `accepted` nor `missing` may still report."""

    plan: RoundPlan
    cohort: Mapping[ClientId, Member]
    accepted: Collection[ClientId]
    missing: Mapping[ClientId, str]  # with reasons

    def samples(self, clients: Iterable[ClientId] | None = None) -> Samples:
        """The samples of the whole cohort, or of these of its clients."""
        selected = reported = n_open = 0
        for client in self.cohort if clients is None else clients:
            worth = min(self.cohort[client].sample_count, self.plan.sample_count_max)
            selected += worth
            if client in self.accepted:
                reported += worth
            elif client not in self.missing:
                n_open += worth
        return Samples(selected, reported, n_open)


def gaps(roll: Roll) -> tuple[Gap, ...]:
    """The missing parts of the plan's coverage: the share of all samples, then sites, then tiers."""
    floor = roll.plan.coverage
    if not floor.is_set:
        return ()
    found = [_share_gap(roll)]
    found += [_site_gap(roll, site) for site in floor.sites]
    found += [_tier_gap(roll, tier) for tier in floor.tiers]
    return tuple(gap for gap in found if gap is not None)


def names(uncovered: Sequence[Gap]) -> str:
    """The first few gaps and the number of others, for a sentence."""
    return some([gap.what for gap in uncovered])


def words(uncovered: Sequence[Gap]) -> str:
    """`names` with reasons."""
    return some([f"{gap.what} ({gap.reason})" for gap in uncovered])


def _share_gap(roll: Roll) -> Gap | None:
    share, samples = roll.plan.coverage.samples, roll.samples()
    if samples.reaches(share):
        return None
    return Gap("samples", "", _too_few(samples, share), samples.left_out, samples.may_reach(share))


def _too_few(samples: Samples, share: float) -> str:
    are_in = part_of(samples.reported, samples.selected, "sample", "is", "are")
    return f"{are_in} in, {samples.share:.0%} of at least {share:.0%}"


def _site_gap(roll: Roll, site: ClientId) -> Gap | None:
    if site in roll.accepted:
        return None
    if site not in roll.cohort:
        return Gap("site", site, "was not waiting when the cohort was drawn", 0)
    reason = roll.missing.get(site, "has not reported yet")
    return Gap("site", site, reason, roll.samples([site]).selected, may_close=site not in roll.missing)


def _tier_gap(roll: Roll, tier: str) -> Gap | None:
    """A tier needs one client, and the floor's share of the samples of its drawn clients."""
    clients = [client for client, member in roll.cohort.items() if member.tier == tier]
    if not clients:
        return Gap("tier", tier, "no client of it was waiting when the cohort was drawn", 0)
    share, samples = roll.plan.coverage.samples, roll.samples(clients)
    if samples.reported and samples.reaches(share):
        return None
    nobody = agreeing(len(clients), "its one client is not in", f"none of its {len(clients)} clients is in")
    reason = _too_few(samples, share) if samples.reported else nobody
    may_close = samples.open > 0 and samples.may_reach(share)
    return Gap("tier", tier, reason, samples.left_out, may_close)
