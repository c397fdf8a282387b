"""The cohort for another sum over a model, after a sum over it was unmasked but made no model. Pure.

A site that has revealed shares accepts another sum over the same model only if its clients are the same, or differ by
at least the site's `minimum_cohort` plus a third (rounded down) of the larger of the two invited cohorts
(docs/decisions/0017-sums-that-could-be-subtracted.md says why). No site takes part in a round whose minimum is below
its `minimum_cohort`, so the plan's minimum is used for it. The first possible choice is taken:

1. *Others*: clients of no earlier sum: a full cohort now, or all that wait once patience has run out. Any subset of
   them may report. A sum of u clients, of n that advertised keys, of N invited, has u >= t > (n + c) / 2 with
   c = floor(N / 3), up to 300 clients (`parameters.py`), and n >= u: so u > c. And u >= minimum. Two sums without a
   common client differ by u + u'. That of the greater cohort has more than c, the other the minimum: together more than
   minimum + c. (Above 300 clients u >= 0.9 n, which is more than c if 0.38 N have advertised keys.)
2. *The same*: the clients of an earlier sum and no others, if all of them wait. All must report.
3. *Apart*: if some of the same are to be avoided or are away: others and as few of the same as needed, if that differs
   enough from every earlier sum when all of them report. All must report.

While some of the same are away, the round waits for them until its patience runs out. Otherwise any clients are asked,
as in any round, and the sites decide: after patience; if one of the same was removed from the fleet, or broke the
protocol while others wait; or if two earlier sums are too near each other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from umbel.aggregation.phrases import counted, some
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.round.cohort import Choice, Member, able_of, choose, passed_over
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.types import ClientId

NAMES_MAX = 1000  # 20 kB in every state of an attempt; a larger sum is not kept, and sites decide


@dataclass(frozen=True, slots=True)
class OpenedSum:
    """A sum whose shares may have been revealed, and that made no model."""

    clients: tuple[ClientId, ...]  # in it
    n_invited: int

    def bears(self, clients: Iterable[ClientId], n_invited: int, minimum: int) -> bool:
        """Whether sites that revealed shares for this sum would accept a second sum over `clients`."""
        n_changed = len(set(self.clients) ^ set(clients))
        return n_changed == 0 or n_changed >= minimum + max(self.n_invited, n_invited) // 3


@dataclass(frozen=True, slots=True)
class Past:
    """Earlier attempts over the model."""

    opened: tuple[OpenedSum, ...]  # oldest first
    avoid: frozenset[ClientId] = frozenset()  # asked last
    liars: frozenset[ClientId] = frozenset()  # those of `avoid` that broke the protocol
    removed: frozenset[ClientId] = frozenset()  # clients of the sums that left the fleet


def with_sum(before: Iterable[OpenedSum], new: OpenedSum) -> tuple[OpenedSum, ...]:
    """The sums, oldest first, each set of clients once; the newest that have `NAMES_MAX` names together."""
    known = {one.clients: one.n_invited for one in before}
    n_invited = max(new.n_invited, known.pop(new.clients, 0))
    kept, n_left = list[OpenedSum](), NAMES_MAX
    for clients, n in reversed([*known.items(), (new.clients, n_invited)]):
        n_left -= len(clients)
        if n_left < 0:
            break
        kept.append(OpenedSum(clients, n))
    return tuple(reversed(kept))


def choose_again(plan: RoundPlan, candidates: Sequence[Candidate], waited_s: float, past: Past) -> Choice:
    """Choose as `cohort.choose` does, but a cohort that sites with revealed shares accept, if possible."""
    again = _Again(plan, candidates, waited_s, past)
    return (
        again.others(0.0)
        or again.the_same(again.blameless)
        or again.others(waited_s)
        or again.apart()
        or again.the_same(again.allowed)
        or again.waiting()
        or again.anybody()
    )


@dataclass(frozen=True)
class _Again:
    """The choices, each None if impossible."""

    plan: RoundPlan
    candidates: Sequence[Candidate]
    waited_s: float
    past: Past

    def others(self, waited_s: float) -> Choice | None:
        """Clients of no earlier sum: a full cohort, or all that wait after this time."""
        unbound = [one for one in self.candidates if one.client not in self._bound]
        choice = choose(self.plan, unbound, waited_s, self._avoid)
        return self._with(choice, "none of them is in an earlier sum over this model")

    def the_same(self, sums: Sequence[OpenedSum]) -> Choice | None:
        """The clients of one of these sums, if all of them wait."""
        known = {one.client: one for one in self.candidates if one.client in self._here}
        complete = next((one for one in sums if known.keys() >= set(one.clients)), None)
        if complete is None:
            return None
        cohort = {name: Member(1, known[name].sample_count, known[name].tier) for name in sorted(complete.clients)}
        why = f"only the {len(cohort)} clients of an earlier sum over this model are asked, and all must report"
        return Choice(cohort, why, passed_over(cohort, self._able), needs_all=True)

    def apart(self) -> Choice | None:
        """As many as the target: no client of `avoid`, and as few of the sums' clients as possible."""
        if self.blameless and self._is_patient:
            return None
        fresh = [one for one in self.candidates if one.client not in self._avoid]
        choice = choose(replace(self.plan, over_selection=1.0), fresh, self.waited_s, self._bound)
        if choice.cohort is None or not self._bears(choice.cohort, len(choice.cohort)):
            return None
        why = "few of them are in an earlier sum over this model, so all must report"
        return self._with(replace(choice, needs_all=True), why)

    def waiting(self) -> Choice | None:
        """Wait while some of the same clients are away."""
        if not self.allowed or not self._is_patient:
            return None
        absent = min(([name for name in one.clients if name not in self._here] for one in self.allowed), key=len)
        left_s, here = self.plan.patience_s - self.waited_s, len(self._here)
        wait = f"{counted(here, 'client waits', 'clients wait')}; waiting {left_s:.1f} s more for {some(absent)}"
        why = "a sum over this model was already unmasked, and sites accept another only from the same clients"
        return Choice(None, f"{wait}: {why}")

    def anybody(self) -> Choice:
        """Any clients, as in any round."""
        choice = choose(self.plan, self.candidates, self.waited_s, self._avoid)
        why = f"sites may refuse, because a sum over this model was already unmasked; {self._why_not()}"
        return self._with(choice, why) or choice

    # --- the same clients ---------------------------------------------------------------------------------------------

    @cached_property
    def allowed(self) -> list[OpenedSum]:
        """The sums whose clients may be asked again, newest first. The plan's numbers are for `n_wanted` at most."""
        numbers = range(self.plan.minimum, self.plan.n_wanted + 1)
        return [
            one
            for one in reversed(self.past.opened)
            if len(one.clients) in numbers
            and self._barred.isdisjoint(one.clients)
            and self._bears(one.clients, len(one.clients))
        ]

    @cached_property
    def blameless(self) -> list[OpenedSum]:
        """Those of them without a client of `avoid`."""
        return [one for one in self.allowed if self._avoid.isdisjoint(one.clients)]

    @cached_property
    def _barred(self) -> frozenset[ClientId]:
        """Clients that are not asked again: removed ones, and liars if enough others wait."""
        are_others_enough = len(self._here - self.past.liars) >= self.plan.n_wanted
        return self.past.removed | (self.past.liars if are_others_enough else frozenset())

    def _why_not(self) -> str:
        """Why the clients of the newest sum are not asked again."""
        clients = self.past.opened[-1].clients
        if removed := [name for name in clients if name in self.past.removed]:
            return f"the operator has removed clients of that sum: {some(removed)}"
        if liars := [name for name in clients if name in self._barred]:
            return f"clients of that sum broke the protocol: {some(liars)}"
        if absent := [name for name in clients if name not in self._here]:
            return f"clients of that sum are not waiting: {some(absent)}"
        return "the clients of that sum are too similar to those of another, or too few or too many for this attempt"

    # --- the sums before ----------------------------------------------------------------------------------------------

    def _bears(self, clients: Iterable[ClientId], n_invited: int) -> bool:
        names = set(clients)
        return all(one.bears(names, n_invited, self.plan.minimum) for one in self.past.opened)

    def _with(self, choice: Choice, why: str) -> Choice | None:
        """The choice with a longer reason; all other waiting clients are passed over. None without a cohort."""
        if choice.cohort is None:
            return None
        return replace(choice, why=f"{choice.why}; {why}", passed_over=passed_over(choice.cohort, self._able))

    @property
    def _avoid(self) -> frozenset[ClientId]:
        return self.past.avoid

    @property
    def _is_patient(self) -> bool:
        return self.waited_s < self.plan.patience_s

    @cached_property
    def _able(self) -> list[Candidate]:
        return able_of(self.plan, self.candidates)

    @cached_property
    def _here(self) -> frozenset[ClientId]:
        return frozenset(one.client for one in self._able)

    @cached_property
    def _bound(self) -> frozenset[ClientId]:
        """The clients of earlier sums."""
        return frozenset(name for one in self.past.opened for name in one.clients)
