"""Who is invited, and why now: a decision and its reason in words, from what is known at this moment."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from umbel.aggregation.types import ClientId, RoundPlan, derive_seed
from umbel.aggregation.weighting import Candidate, draw

_DRAWS_MAX = 64


@dataclass(frozen=True, slots=True)
class Member:
    """One client of a cohort: how many draws fell on it, and what it said of itself when it was drawn."""

    draws: int
    sample_count: int
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """`cohort`: None while the round should go on waiting; `why`: for log and API alike."""

    cohort: Mapping[ClientId, Member] | None
    why: str


def choose(plan: RoundPlan, candidates: Sequence[Candidate], waited_s: float) -> Choice:
    """Draw the cohort once enough clients wait, or once patience has run out and at least the minimum do.

    Candidates without samples are passed over, and no sample count is taken for more than the plan's maximum: it bounds
    what one client's word is worth, in the draw as in the mean. A cohort of fewer clients than the minimum could never
    close, so it is drawn again. `waited_s`: how long the round has been recruiting.
    """
    able = [
        replace(candidate, sample_count=min(candidate.sample_count, plan.sample_count_max))
        for candidate in candidates
        if candidate.sample_count > 0
    ]
    n_able, wanted = len(able), plan.n_wanted
    if n_able < wanted and waited_s < plan.patience_s:
        return Choice(
            None,
            f"{n_able} of {wanted} clients wait; another {plan.patience_s - waited_s:.1f} s for the rest",
        )
    if n_able < plan.minimum:
        return Choice(None, f"{n_able} clients wait, the round needs at least {plan.minimum}")
    for cohort in _draws(plan, able):
        if len(cohort) >= plan.minimum:
            why = f"drew {len(cohort)} of {n_able} waiting clients, {wanted} wanted for {plan.target} reports"
            known = {candidate.client: candidate for candidate in candidates}
            members = {
                client: Member(draws, known[client].sample_count, known[client].tier)
                for client, draws in cohort.items()
            }
            return Choice(members, why)
    return Choice(
        None,
        f"{n_able} clients wait, but a few hold so much of the data that no draw reaches {plan.minimum} of them; "
        "lower sample_count_max in the run file, or weight by samples",
    )


def _draws(plan: RoundPlan, able: Sequence[Candidate]) -> Iterator[Mapping[ClientId, int]]:
    """The round's draw and, for want of clients in it, the next: with replacement, all draws may fall on one client."""
    for repeat in range(_DRAWS_MAX):
        labels = ("cohort", plan.number, plan.attempt, *((repeat,) if repeat else ()))
        yield draw(plan.weighting, able, plan.n_wanted, derive_seed(plan.seed, *labels))
