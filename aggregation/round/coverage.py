"""How much of a cohort's data is in, and what the coverage floor still asks for, from the round's own maps. Pure.

A sample count is what the client announced when it was drawn, on both sides of every share, and never more than the
run's `sample_count_max`: so nobody can hold a round open by claiming more than it could ever be worth.
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
    """One thing the floor asks for that is not in. `name`: of the site or tier; empty for the share of all samples.

    `sample_count`: how much announced data is missing there; 0 where nobody announced any. `may_close`: somebody who
    could fill it may still report; never once the round has ended.
    """

    kind: Literal["samples", "site", "tier"]
    name: str
    reason: str
    sample_count: int
    may_close: bool = False

    @property
    def what(self) -> str:
        return "the share of samples" if self.kind == "samples" else f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Samples:
    """Announced samples of a group of clients: of all, of those whose reports are in, of those who may still report."""

    selected: int
    reported: int
    open: int

    @property
    def left_out(self) -> int:
        return self.selected - self.reported

    @property
    def share(self) -> float:
        """How much of the data is in, 0 to 1; nothing at all of nothing."""
        return self.reported / self.selected if self.selected else 0.0

    def reaches(self, share: float) -> bool:
        return self.reported >= share * self.selected - _ROUNDING * self.selected

    def may_reach(self, share: float) -> bool:
        """Whether it would if everybody reported who still may."""
        return self.reported + self.open >= share * self.selected - _ROUNDING * self.selected


@dataclass(frozen=True, slots=True)
class Roll:
    """A cohort called over: who is in (`accepted`), and who will not come and why (`missing`); the rest may still."""

    plan: RoundPlan
    cohort: Mapping[ClientId, Member]
    accepted: Collection[ClientId]
    missing: Mapping[ClientId, str]

    def samples(self, clients: Iterable[ClientId] | None = None) -> Samples:
        """Of the whole cohort, or of these of its clients."""
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
    """What the plan's coverage asks for and is not in: the share of all samples, then sites, then tiers."""
    floor = roll.plan.coverage
    if not floor.is_set:
        return ()
    found = [_share_gap(roll)]
    found += [_site_gap(roll, site) for site in floor.sites]
    found += [_tier_gap(roll, tier) for tier in floor.tiers]
    return tuple(gap for gap in found if gap is not None)


def names(uncovered: Sequence[Gap]) -> str:
    """The gaps for a sentence: the first few, and how many more."""
    return some([gap.what for gap in uncovered])


def words(uncovered: Sequence[Gap]) -> str:
    """The gaps with their reasons, likewise."""
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
    """A tier is in with one client of it, and with the floor's share of the samples that its drawn clients hold."""
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
