"""Who is asked for another sum over a model, where shares of one were revealed and nothing came of it. Pure.

A site that has revealed shares refuses another sum over the same model, unless its clients are the very same or differ
by as many as the site's `minimum_cohort` and a third of those invited, rounded down, of the greater of the two cohorts
(docs/decisions/0017-sums-that-could-be-subtracted.md says why). No site takes part in a round whose minimum is less
than its `minimum_cohort`, so the plan's minimum stands for that. Whoever can be asked of these is, in this order:

1. *Others*: clients that are in no such sum, if a full cohort of them waits, or after patience as many as are there;
   then it does not matter who of them comes. A sum of u clients, of n that advertised keys, of N invited, has
   u >= t > (n + c) / 2 with c = floor(N / 3), up to 300 clients (`parameters.py`), and n >= u: so u > c. And
   u >= minimum. Two sums without a common client differ by u + u'. That of the greater cohort has more than c, the
   other the minimum: together more than minimum + c. (Above 300 clients u >= 0.9 n, which is more than c if 0.38 N
   have advertised keys.)
2. *The same*: the clients of such a sum and no others, if all of them wait. Nothing can come of it without one of them.
3. *Apart*: where some of the same are to be asked last, or stay away, others and as few of the same as it takes, if
   that is far enough from every such sum when all of them come. Without one of them it may not be.

While some of the same are away they are waited for as long as the round's patience lasts. Where none of this can be,
anybody is asked, as in any round, and the sites decide: after patience; where one of the same was removed from the
fleet, or has not kept to the protocol and others wait; where two such sums are too near each other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from umbel.aggregation.phrases import counted, some
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.round.cohort import Choice, Member, able_of, choose, passed_over
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.types import ClientId

NAMES_MAX = 1000  # 20 kB with every state of an attempt. A larger sum is not kept, and sites decide


@dataclass(frozen=True, slots=True)
class OpenedSum:
    """A sum of which shares may have been revealed, in vain. `clients`: in it; `n_invited`: how many were asked."""

    clients: tuple[ClientId, ...]
    n_invited: int

    def bears(self, clients: Iterable[ClientId], n_invited: int, minimum: int) -> bool:
        """Whether its clients take part in a sum of these, of so many invited, over the same model."""
        n_changed = len(set(self.clients) ^ set(clients))
        return n_changed == 0 or n_changed >= minimum + max(self.n_invited, n_invited) // 3


@dataclass(frozen=True, slots=True)
class Past:
    """What earlier attempts over the model have left. `opened`: the sums, the oldest first; `avoid`: whom to ask last.

    `liars`: who of these has not kept to the protocol; `removed`: clients of the sums that are in the fleet no more.
    """

    opened: tuple[OpenedSum, ...]
    avoid: frozenset[ClientId] = frozenset()
    liars: frozenset[ClientId] = frozenset()
    removed: frozenset[ClientId] = frozenset()


def with_sum(before: Iterable[OpenedSum], new: OpenedSum) -> tuple[OpenedSum, ...]:
    """The sums, the oldest first, of the same clients one; of more than `NAMES_MAX` names the newest."""
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
    """Choose as `cohort.choose` does, but so that sites that have revealed shares agree, where that can be."""
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
    """The ways to choose, each None where it is none."""

    plan: RoundPlan
    candidates: Sequence[Candidate]
    waited_s: float
    past: Past

    def others(self, waited_s: float) -> Choice | None:
        """Of clients that are in no such sum: a full cohort, or what is there after so long a time."""
        unbound = [one for one in self.candidates if one.client not in self._bound]
        choice = choose(self.plan, unbound, waited_s, self._avoid)
        return self._with(choice, "none of them is in a sum over this model that was opened in vain")

    def the_same(self, sums: Sequence[OpenedSum]) -> Choice | None:
        """Of the clients of one of these sums, all of whom wait."""
        known = {one.client: one for one in self.candidates if one.client in self._here}
        complete = next((one for one in sums if known.keys() >= set(one.clients)), None)
        if complete is None:
            return None
        cohort = {name: Member(1, known[name].sample_count, known[name].tier) for name in sorted(complete.clients)}
        why = f"the {len(cohort)} of a sum over this model that was opened in vain, and no others: all must report"
        return Choice(cohort, why, passed_over(cohort, self._able), needs_all=True)

    def apart(self) -> Choice | None:
        """As many as the target: none of those who are to be asked last, of the sums' clients as few as it takes."""
        if self.blameless and self._is_patient:
            return None
        fresh = [one for one in self.candidates if one.client not in self._avoid]
        choice = choose(replace(self.plan, over_selection=1.0), fresh, self.waited_s, self._bound)
        if choice.cohort is None or not self._bears(choice.cohort, len(choice.cohort)):
            return None
        why = "few of them are in a sum over this model that was opened in vain, so all must report"
        return self._with(replace(choice, needs_all=True), why)

    def waiting(self) -> Choice | None:
        """Of nobody yet, while some of the same clients are away."""
        if not self.allowed or not self._is_patient:
            return None
        absent = min(([name for name in one.clients if name not in self._here] for one in self.allowed), key=len)
        left_s, here = self.plan.patience_s - self.waited_s, len(self._here)
        wait = f"{counted(here, 'client waits', 'clients wait')}; another {left_s:.1f} s for {some(absent)}"
        return Choice(None, f"{wait}, without whom sites refuse a sum: one over this model was opened in vain")

    def anybody(self) -> Choice:
        """Of all, as in any round."""
        choice = choose(self.plan, self.candidates, self.waited_s, self._avoid)
        why = f"sites may refuse, for over this model a sum was opened in vain: {self._why_not()}"
        return self._with(choice, why) or choice

    # --- who can be asked for the same sum ----------------------------------------------------------------------------

    @cached_property
    def allowed(self) -> list[OpenedSum]:
        """The sums whose clients may be asked for another one, the newest first.

        The plan's numbers are for `n_wanted` clients at most.
        """
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
        """Those of them without anybody who is to be asked last."""
        return [one for one in self.allowed if self._avoid.isdisjoint(one.clients)]

    @cached_property
    def _barred(self) -> frozenset[ClientId]:
        """Who is not asked for the same sum: who lied, only where enough others wait."""
        are_others_enough = len(self._here - self.past.liars) >= self.plan.n_wanted
        return self.past.removed | (self.past.liars if are_others_enough else frozenset())

    def _why_not(self) -> str:
        """Why the clients of the newest sum are not asked for another one."""
        clients = self.past.opened[-1].clients
        if removed := [name for name in clients if name in self.past.removed]:
            return f"of its clients the operator has removed {some(removed)}"
        if liars := [name for name in clients if name in self._barred]:
            return f"of its clients {some(liars)} did not keep to the protocol"
        if absent := [name for name in clients if name not in self._here]:
            return f"of its clients {some(absent)} did not come"
        return "its clients are too near to those of another such sum, or too many for this attempt"

    # --- what all of them go by ---------------------------------------------------------------------------------------

    def _bears(self, clients: Iterable[ClientId], n_invited: int) -> bool:
        names = set(clients)
        return all(one.bears(names, n_invited, self.plan.minimum) for one in self.past.opened)

    def _with(self, choice: Choice, why: str) -> Choice | None:
        """The choice, if it is one, with more words; passed over are all who wait beside it."""
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
        """Who is in a sum that was opened in vain."""
        return frozenset(name for one in self.past.opened for name in one.clients)
