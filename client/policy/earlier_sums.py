"""What two sums with this client in them could tell together of one site, and which are refused for it.

Sums cannot be taken back, and they can be subtracted: of two sums over the same updates, of which one lacks a client,
the difference is that client's update. Three things stand against it.

*No update twice.* The site trains from a seed that it draws itself (`Site.admit`), so its update to one model is
another one each time, though near the last: what is said below is about updates that are near, not equal.

*One model.* Updates to one and the same model differ by the chance of their training alone, so the difference of two
such sums is nearly that of the clients by whom they differ. Some of these may work for the coordinator, which then
knows what they have sent, and takes it off: c = floor(N / 3) at most, N being the greater of the two cohorts. So a
sum over a model of which shares of another sum were revealed is refused, unless its clients are the very same, or
differ by `minimum_cohort` + c or more: what is left then is of `minimum_cohort` honest clients, the least that a sum
may hide an update among. The very same are allowed, so a round whose sum was opened in vain can be made again (the
coordinator asks them, or many others: `aggregation/round/second_sum.py`), and so can one after a rollback. The model is
what counts, not the run: another run from it would be the same attack.

- What binds is what this client has *revealed*. A sum of u clients, of n in the roster, opens when t of the u reveal
  shares, t > (n + c) / 2 (`parameters.py`, up to 300 clients). Two that differ by d clients are of (u + u' + d) / 2
  together, so more than c - d / 2 reveal shares of both. If c' of these work for the coordinator, there is one that
  does not, and refuses the second sum, where d <= 2 (c - c') + 1: also where most were never asked about the first.
  With c' = c that is d = 1 alone. For greater d the coordinator could have the one sum opened by some sites, the other
  by others, and the rule holds as far as it must ask the same ones.
- A sum that this client has signed, and no more, binds nobody: too few may have signed, and while those who fell silent
  are away the clients that are left could never go on. The others that revealed shares of it, if any did, refuse.
- A sum that this client was never told of may be of any of its cohort. Nothing is certain of it, and every attempt that
  fails for want of reports leaves one behind, so it is a warning at most.
- An invitation is refused at once if the sum cannot be of the same clients as before, and would be too near; else it
  hangs on who comes, and the sum is looked at when it is told, before it is signed.

*Several models.* From round to round of a run models differ, but updates do not differ much: the difference of two sums
is nearly as telling as over one model (`docs/decisions/0014-cohort-changes-are-refused.md` has figures). So a sum whose
clients differ by fewer than `minimum_cohort` from those of another sum of the run is refused, where the policy names a
member list (`cohort_change`), else warned of. Here, too, only sums that this client has revealed shares of bind; those
that it has signed, or sent to, are warned of. The newest hundred sums of the run are looked at. Of the same clients a
process warns once.

*Other terms.* A bound that the coordinator chooses changes the parts of those sites alone that are beyond it. Of two
sums of the very same clients under `sample_count_max` 100 and 200, twice the first less the second is of the sites with
fewer than 200 samples alone, and that may be one. A clip norm tells as much, and so does how much is trained
(`sum_terms.py`). So within a run a sum under other terms is refused or warned of as the policy says (`terms_change`),
unless its clients differ by as many as above. It is so whether the model is the same or not: a coordinator changes one
bit of it for nothing. Another run may have other terms, also from the same model, for people try out settings so; a
policy says which runs there may be (`allowed_runs`).

*Who was taken off.* A member that cheated, or left for good, would bind the others to its coming for ever. So who is
not on the member list that this site's policy names, and the round is bound to, does not count in a difference.
Officers have signed that list; the coordinator cannot take a member off. The price is that the update of who was taken
off may be had by subtraction.

*Names.* An attempt's id is the coordinator's word: one that is remembered is refused (`check_attempt`), and an entry
goes by a key of this client's own, which only the process that made the entry knows.

*How old* a sum is does not matter for the rule over one model: all that were revealed are kept (`revealed_sums.py`).

What this does not do: a coordinator that changes one bit of the model has another model, and one that permutes the
hidden units of a network has one that is far from the first and gives the same updates, so no distance between models
could bind it: there `cohort_change` and `terms_change` are left. Three sums or more, of which each two differ by many,
can be added and subtracted to leave one client; no client need be in all of them. Against both there are `cohort_change
= "refuse"`, in part, and noise. In a private run whose cost the site counts the noise is there and each attempt is
charged, so nothing is refused but what `cohort_change` and `terms_change` say, if they are written in the policy.
"""

import hashlib
import logging
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from umbel.aggregation.canonical import canonical
from umbel.aggregation.types import RunId
from umbel.client.errors import AttemptRefused
from umbel.client.policy.policy import SitePolicy
from umbel.client.state.revealed_sums import RevealedSum
from umbel.client.state.secure_store import RememberedSum, SecureStore
from umbel.client.wire.offers import SecureInvitation

T = TypeVar("T")
_KEY_BYTES = 16
_WARNED_MAX = 10_000
_KEEP_OUT = ' cohort_change = "refuse" in this site\'s policy declines such rounds.'
_KEEP_TERMS = ' terms_change = "refuse" in this site\'s policy declines such rounds'
_AVOID = (
    " In the run file, target and minimum = the number of sites and over_selection = 1.0 prevent them; noise "
    "([privacy]) covers them"
)
log = logging.getLogger("umbel.client")


@dataclass(frozen=True, slots=True)
class _Earlier:
    """A sum before this one, or what is known of it. `name`: which round it was of, in words; `clients`: those of it,
    or of its cohort, that count.
    """

    name: str
    clients: frozenset[str]


class EarlierSums:
    """The sums that an update of this client may be in. Kept on disk: a restart forgets nothing.

    `members`, where it is asked for: the names on the list that the policy names; None if there is no such list.
    """

    def __init__(self, run: RunId, policy: SitePolicy, kept: SecureStore) -> None:
        self._run = run
        self._policy = policy
        self._kept = kept
        self._own: RememberedSum | None = None  # of the attempt under way, and made by this process
        self._warned_of = set[int]()  # of the clients of two sums a hash, for a cohort may have many long names
        self._warned_of_terms = set[str]()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is remembered of this run."""
        return not self._kept.sums(self._run)

    # --- what is asked ---

    def check_invitation(self, invitation: SecureInvitation, members: Collection[str] | None = None) -> None:
        """Raise `AttemptRefused` for an attempt whose sum must not be, whoever comes of its cohort."""
        invited = set(invitation.context.names)
        if not self._policy.relies_on(invitation.offer.plan.noise):
            self._check_second_update(invitation)
            for run, one in self._bound_by(invitation):
                before = _counted(one.clients, members)
                if not invited.issuperset(before):
                    self._check_same_model(invitation, run, one, before, invited)
        sums = self._kept.sums(self._run)
        binding = [_earlier(invitation, one, one.cohort, members) for one in sums if one.is_revealed]
        others = [_earlier(invitation, one, one.cohort, members) for one in sums if not one.is_revealed]
        self._check_change(invitation, frozenset(invited), binding, others)
        self._check_terms(invitation, frozenset(invited), members)

    def check_attempt(self, invitation: SecureInvitation) -> None:
        """Raise `AttemptRefused` for an attempt whose id a sum of any run has that is remembered."""
        newest, revealed = self._kept.sums_of_all_runs(), self._kept.revealed_of_all_runs()
        known = {one.attempt_id for sums in newest.values() for one in sums}
        known |= {one.attempt_id for sums in revealed.values() for one in sums}
        if invitation.context.attempt_id in known:
            raise AttemptRefused(
                "the coordinator reused an attempt id: this client has already sent an update under it"
            )

    def check_sum(
        self, invitation: SecureInvitation, clients: Collection[str], members: Collection[str] | None = None
    ) -> None:
        """What `check_invitation` does of the sum, now that it is told whose it is."""
        if not self._policy.relies_on(invitation.offer.plan.noise):
            for run, one in self._bound_by(invitation):
                self._check_same_model(invitation, run, one, _counted(one.clients, members), clients)
        signed = [one for one in self._kept.sums(self._run) if one.clients]
        binding = [_earlier(invitation, one, one.clients, members) for one in signed if one.is_revealed]
        others = [_earlier(invitation, one, one.clients, members) for one in signed if not one.is_revealed]
        self._check_change(invitation, frozenset(clients), binding, others)
        self._check_terms(invitation, frozenset(clients), members)

    # --- what happens ---

    def sending(self, invitation: SecureInvitation) -> None:
        """Before the masked update is sent: from then on it may be in a sum that this client is not told of."""
        offer, names = invitation.assignment, tuple(invitation.context.names)
        key = secrets.token_hex(_KEY_BYTES)
        one = RememberedSum(key, invitation.context.attempt_id, offer.round, offer.model.sha256, names)
        self._remember(replace(one, terms_sha256=terms_sha256(invitation)))

    def signing(self, invitation: SecureInvitation, clients: Collection[str]) -> None:
        """Before it is signed whose sum it is."""
        self._remember(replace(self._own_of(invitation), clients=tuple(clients)))

    def revealing(self, invitation: SecureInvitation) -> None:
        """Before shares are sent."""
        self._remember(replace(self._own_of(invitation), is_revealed=True))

    def _remember(self, one: RememberedSum) -> None:
        self._kept.remember(self._run, one)
        self._own = one

    def _own_of(self, invitation: SecureInvitation) -> RememberedSum:
        """What this process has made of this attempt. Raises `LookupError` if it has sent nothing in it."""
        if self._own is None or self._own.attempt_id != invitation.context.attempt_id:
            raise LookupError("no update was sent in this attempt")
        return self._own

    # --- the rules ---

    def _check_second_update(self, invitation: SecureInvitation) -> None:
        """The policy's word where shares were revealed of the round, of one after it, or of the model."""
        offer = invitation.assignment
        newest = max((one.round for one in self._kept.revealed(self._run)), default=0)
        if offer.round <= newest:
            self._policy.check_second_update(newest)
        for run, one in self._bound_by(invitation):
            self._policy.check_second_update(one.round, "" if run == self._run else run)

    def _check_same_model(
        self, invitation: SecureInvitation, run: RunId, one: RevealedSum, before: Collection[str], now: Collection[str]
    ) -> None:
        place = f"round {one.round} of run {run!r}"
        self._policy.check_same_model(before, now, _n_invited(invitation, one), place)

    def _check_terms(self, invitation: SecureInvitation, now: frozenset[str], members: Collection[str] | None) -> None:
        """Raise `AttemptRefused` for a sum of nearly the clients of one of the run of which shares were revealed, under
        other terms, or warn.
        """
        if self._policy.relies_on(invitation.offer.plan.noise) and self._policy.terms_change is None:
            return
        terms, check = terms_sha256(invitation), self._policy.check_terms_change
        for one in self._kept.revealed(self._run):
            if _is_of_same_terms(one, invitation):
                continue
            before, n_invited = _counted(one.clients, members), _n_invited(invitation, one)
            found = check(before, now, n_invited, f"round {one.round}")
            if found is not None and terms not in self._warned_of_terms:
                log.warning("round %d: %s.%s", invitation.assignment.round, found, _KEEP_TERMS)
                _note(self._warned_of_terms, [terms])

    def _check_change(
        self, invitation: SecureInvitation, now: frozenset[str], binding: Iterable[_Earlier], others: Iterable[_Earlier]
    ) -> None:
        """Raise `AttemptRefused` for clients too near to some of `binding`, of which shares were revealed, or warn; of
        `others` warn. Of several the nearest is named, and of the same clients nothing is said twice.
        """
        if self._policy.relies_on(invitation.offer.plan.noise) and self._policy.cohort_change is None:
            return
        between, check = self._policy.cohort_change_between, self._policy.check_cohort_change
        near = [one for one in binding if check(one.clients, now, one.name) is not None]
        near += [one for one in others if between(one.clients, now, one.name) is not None]
        if new := [one for one in near if _pair(one.clients, now) not in self._warned_of]:
            nearest = min(new, key=lambda one: len(one.clients ^ now))
            log.warning(
                "round %d: %s. A round without this site would reveal its update in the same way.%s%s",
                invitation.assignment.round,
                between(nearest.clients, now, nearest.name),
                "" if self._policy.refuses_cohort_change else _KEEP_OUT,
                _AVOID,
            )
        _note(self._warned_of, [_pair(one.clients, now) for one in near])

    def _bound_by(self, invitation: SecureInvitation) -> list[tuple[RunId, RevealedSum]]:
        """Those over the same model, of any run and however old, of which this client has revealed shares."""
        model, every = invitation.assignment.model.sha256, self._kept.revealed_of_all_runs()
        return [(run, one) for run, sums in every.items() for one in sums if one.model_sha256 == model]


def _note(warned_of: set[T], more: Collection[T]) -> None:
    """A warning that is said again is better than a full memory."""
    if len(warned_of) > _WARNED_MAX:
        warned_of.clear()
    warned_of.update(more)


def _pair(before: frozenset[str], now: frozenset[str]) -> int:
    return hash(frozenset((before, now)))


def _n_invited(invitation: SecureInvitation, one: RevealedSum) -> int:
    """The greater of the two cohorts."""
    return max(len(invitation.context.cohort), one.n_invited)


def _is_of_same_terms(one: RevealedSum, invitation: SecureInvitation) -> bool:
    """Also where a version of umbel wrote the sum down that did not write its terms: a run goes on after an update."""
    return one.terms_sha256 in ("", terms_sha256(invitation))


def _earlier(
    invitation: SecureInvitation, one: RememberedSum, clients: Collection[str], members: Collection[str] | None
) -> _Earlier:
    """`clients`: of this sum of the same run, or its cohort."""
    attempt = "an earlier attempt at " if one.round == invitation.assignment.round else ""
    return _Earlier(f"{attempt}round {one.round}", frozenset(_counted(clients, members)))


def _counted(clients: Collection[str], members: Collection[str] | None) -> list[str]:
    """Of the clients of an earlier sum, those that count in a difference: who is still on the list, if there is one."""
    return [name for name in clients if members is None or name in members]


def terms_sha256(invitation: SecureInvitation) -> str:
    """SHA-256, in hex, of what the training is and of every bound on what comes of it.

    It is kept on disk for as long as a run lasts, so a release that hashed anything else would stop every run.
    """
    offer, plan = invitation.assignment, invitation.offer.plan
    training = offer.training
    terms = {
        "local_epochs": training.local_epochs,
        "local_steps": training.local_steps,
        "batch_size": training.batch_size,
        "learning_rate": training.learning_rate,
        "proximal_mu": training.proximal_mu,
        "is_private": plan.is_private,
        "clip_norm": offer.codec.clip_norm,
        "max_abs": offer.grid.max_abs,
        "sample_count_max": offer.sample_count_max,
        "weight_unit": plan.weight_unit,
        "minimum_work": plan.minimum_work,
    }
    return hashlib.sha256(canonical(terms).encode()).hexdigest()
