"""Which clients a round invites, and why now: a decision and its reason in words."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from umbel.aggregation.phrases import counted, lasting, some
from umbel.aggregation.plans.round import CoverageFloor, RoundPlan
from umbel.aggregation.round.weighting import Candidate, draw
from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.types import ClientId

_DRAWS_MAX = 64
_ABSENT_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Member:
    """One client of a cohort."""

    draws: int  # that fell on it
    sample_count: int  # that it announced
    tier: str = ""


@dataclass(frozen=True, slots=True)
class PassedOver:
    """The clients that waited and were not drawn."""

    clients: int = 0
    samples: int = 0  # that they announced


@dataclass(frozen=True, slots=True)
class Choice:
    """A drawn cohort, or the reason to wait."""

    cohort: Mapping[ClientId, Member] | None  # None: keep waiting
    why: str  # for log and API
    passed_over: PassedOver = PassedOver()
    needs_all: bool = False  # whether the round fails without any one of the cohort (`second_sum.py`)


@dataclass(frozen=True, slots=True)
class Expected:
    """Clients that are likely to come to a round, so that it waits for them. Times in Unix seconds."""

    until: Mapping[ClientId, float]  # how long the round waits for each of them at most
    unnamed: int = 0  # further clients whose names are unknown: unused enrolment tokens
    unnamed_until: float = 0.0  # how long the round waits for those
    others_until: float = 0.0  # how long it waits for a full cohort even if nobody is expected

    def missing(self, able: Collection[ClientId], now: float) -> tuple[ClientId, ...]:
        """The named clients that are still waited for, in the order of names."""
        return tuple(sorted(client for client, until in self.until.items() if client not in able and until > now))

    def ends_at(self, able: Collection[ClientId]) -> float:
        """When the round starts with those that wait, if no other client comes."""
        named = (until for client, until in self.until.items() if client not in able)
        return max(self.others_until, self.unnamed_until if self.unnamed else 0.0, *named, 0.0)


def choose(
    plan: RoundPlan,
    candidates: Sequence[Candidate],
    waited_s: float,
    avoid: Collection[ClientId] = (),
    left_s: float | None = None,
) -> Choice:
    """Draw the cohort once enough clients wait, or once patience has run out and at least the minimum wait.

    Candidates without samples are passed over, unless the round does without counts. A sample count above the plan's
    maximum counts as the maximum, which bounds one client's weight in the draw as in the mean. A cohort of fewer
    clients than the minimum could never close, so it is drawn again. Sites and tiers that the plan's coverage names are
    in the cohort if they wait. The round waits for them as for a full cohort: until patience runs out, or for ever if
    coverage is strict. `waited_s`: since recruiting began. `avoid`: drawn only if there are too few others.
    `left_s`: how much longer to wait for a full cohort; None: until the plan's patience runs out.
    """
    able = able_of(plan, candidates)
    if why := _why_wait(plan, able, plan.patience_s - waited_s if left_s is None else left_s):
        return Choice(None, why)
    for cohort in _draws(plan, able, avoid):
        if len(cohort) >= plan.minimum:
            waiting, reports = counted(len(able), "waiting client"), counted(plan.target, "report")
            why = f"drew {len(cohort)} of {waiting}; the round wants {plan.n_wanted} to get {reports}"
            return Choice(_members(cohort, candidates), why, passed_over(cohort, able))
    return Choice(
        None,
        f"{_wait(len(able))}, but a few hold so much of the data that no draw has {plan.minimum} different "
        'clients: lower sample_count_max in the run file, or set weighting = "samples"',
    )


def able_of(plan: RoundPlan, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that may be drawn, with capped sample counts."""
    return [
        candidate
        if candidate.sample_count <= plan.sample_count_max
        else replace(candidate, sample_count=plan.sample_count_max)
        for candidate in candidates
        if candidate.sample_count > 0 or not plan.needs_counts
    ]


def passed_over(cohort: Collection[ClientId], able: Sequence[Candidate]) -> PassedOver:
    """The clients of `able` that were not drawn."""
    rest = [candidate.sample_count for candidate in able if candidate.client not in cohort]
    return PassedOver(len(rest), sum(rest))


def _why_wait(plan: RoundPlan, able: Sequence[Candidate], left_s: float) -> str:
    """Why no cohort is drawn yet; empty if one may be. `left_s`: of the time to wait for a full cohort."""
    n_able, wanted = len(able), plan.n_wanted
    absent = _absent(plan.coverage, able)
    if n_able < plan.minimum:
        return too_few(plan, n_able)
    if n_able < wanted and left_s > 0:
        return f"waiting for clients: {n_able} of {wanted} here; starting with these in at most {lasting(left_s)}"
    if absent and plan.coverage.strict:
        return f"{_wait(n_able)}, but strict coverage also needs {some(absent, _ABSENT_SHOWN)}"
    if absent and left_s > 0:
        return f"{_wait(n_able)}; waiting {left_s:.1f} s more for {some(absent, _ABSENT_SHOWN)}"
    return ""


def too_few(plan: RoundPlan, n_able: int) -> str:
    """Why a round waits that has too few clients."""
    return f"waiting for clients: {n_able} of {plan.n_wanted} here, at least {plan.minimum} needed to start"


def _wait(n_clients: int) -> str:
    return counted(n_clients, "client waits", "clients wait")


def _absent(floor: CoverageFloor, able: Sequence[Candidate]) -> list[str]:
    """The sites and tiers of the floor without a waiting client."""
    clients = {candidate.client for candidate in able}
    tiers = {candidate.tier for candidate in able}
    sites = [f"site {site}" for site in floor.sites if site not in clients]
    return sites + [f"tier {tier}" for tier in floor.tiers if tier not in tiers]


def _draws(plan: RoundPlan, able: Sequence[Candidate], avoid: Collection[ClientId]) -> Iterator[Mapping[ClientId, int]]:
    """The round's draws in order; the next one is used if one has too few clients (draws are with replacement).

    A canary is not drawn: it takes clients that differ.
    """
    if plan.task.tries_clients:
        required = _required(plan.coverage, able, avoid, plan.seed)
        fresh = [one for one in able if one.client in required or one.client not in avoid]
        yield spread(able, plan.n_wanted, spread(fresh, plan.n_wanted, required))
        return
    for repeat in range(_DRAWS_MAX):
        labels = ("cohort", plan.number, plan.attempt, *((repeat,) if repeat else ()))
        seed = derive_seed(plan.seed, *labels)
        required = _required(plan.coverage, able, avoid, seed)
        yield draw(plan.weighting, able, plan.n_wanted, seed, required=required, last=avoid)


def _required(
    floor: CoverageFloor, able: Sequence[Candidate], avoid: Collection[ClientId], seed: int
) -> frozenset[ClientId]:
    """The waiting named sites, and one evenly drawn client of each named tier without any of them."""
    clients = {candidate.client: candidate for candidate in able}
    required = {site for site in floor.sites if site in clients}
    for tier in floor.tiers:
        of_tier = [client for client, candidate in clients.items() if candidate.tier == tier]
        if of_tier and required.isdisjoint(of_tier):
            required.add(min(of_tier, key=lambda c: (c in avoid, derive_seed(seed, "tier", c))))
    return frozenset(required)


def _members(cohort: Mapping[ClientId, int], candidates: Sequence[Candidate]) -> dict[ClientId, Member]:
    known = {candidate.client: candidate for candidate in candidates}
    return {client: Member(draws, known[client].sample_count, known[client].tier) for client, draws in cohort.items()}


def spread(
    candidates: Sequence[Candidate], n_wanted: int, required: Collection[ClientId] = ()
) -> Mapping[ClientId, int]:
    """At most `n_wanted` clients that differ as much as possible, one draw each, in the order of names.

    First the `required` ones (at most `n_wanted`), then one of each tier in turn: alternately the remaining client with
    the most and with the fewest samples. The tier of the largest client comes first, and begins with it; the second
    tier begins with its smallest, and so on. The same candidates, in any order, give the same answer.
    """
    chosen = [client for client in sorted(required) if client in {one.client for one in candidates}]
    tiers = _tiers([one for one in candidates if one.client not in required])
    turns = deque((tier, index % 2 == 0) for index, tier in enumerate(tiers))
    while turns and len(chosen) < n_wanted:
        tier, takes_largest = turns.popleft()
        chosen.append(tier.pop() if takes_largest else tier.popleft())
        if tier:
            turns.append((tier, not takes_largest))
    return dict.fromkeys(sorted(chosen), 1)


def _tiers(candidates: Sequence[Candidate]) -> list[deque[ClientId]]:
    """Each tier's clients from the smallest to the largest; the tier of the largest client first."""
    by_tier: dict[str, deque[ClientId]] = {}
    for one in sorted(candidates, key=lambda one: (one.sample_count, one.client)):
        by_tier.setdefault(one.tier, deque()).append(one.client)
    size = {one.client: (one.sample_count, one.client) for one in candidates}
    return sorted(by_tier.values(), key=lambda tier: size[tier[-1]], reverse=True)
