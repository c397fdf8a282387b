"""The sums that an update of this site may be in, and the check of each new sum against them.

A sum is refused if its difference to an earlier one could reveal one site's update.
docs/decisions/0017-sums-that-could-be-subtracted.md has the rules and their reasons.
"""

import hashlib
import logging
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from umbel.aggregation.canonical import canonical, later_fields
from umbel.aggregation.plans.training import TrainingPlan
from umbel.aggregation.types import RunId
from umbel.client.errors import AttemptRefused
from umbel.client.policy.policy import SitePolicy
from umbel.client.policy.two_sums import (
    check_cohort_change,
    check_same_model,
    check_terms_change,
    cohort_change_between,
)
from umbel.client.state.secure_store import RememberedSum, RevealedSum, SecureStore
from umbel.client.wire.offers import SecureInvitation

_KEY_BYTES = 16
_WARNED_MAX = 10_000
_MEASURED_LATER = ("evaluate_after", "inexactness")  # terms that change no update
_KEEP_OUT = ' To decline such rounds, set cohort_change = "refuse" in this site\'s policy.'
_KEEP_TERMS = ' To decline such rounds, set terms_change = "refuse" in this site\'s policy'
_AVOID = (
    " The operator can prevent such rounds: in the run file, set target and minimum to the number of sites, and "
    "over_selection = 1.0. Or the run file can add noise ([privacy]), which hides one site's update"
)
log = logging.getLogger("umbel.client")


@dataclass(frozen=True, slots=True)
class _Earlier:
    """What is known of an earlier sum."""

    name: str  # its round, in words
    is_binding: bool  # whether this client revealed shares of it
    clients: frozenset[str]  # the clients of the sum, or of its cohort, that count in a difference
    has_updates: bool


class KeptSums(Protocol):
    """The sums that a site remembers; `SecureStore` keeps them on disk."""

    def sums(self, run: RunId) -> tuple[RememberedSum, ...]:
        """The newest sums of this run, the oldest first."""
        ...

    def sums_of_all_runs(self) -> dict[RunId, tuple[RememberedSum, ...]]: ...

    def revealed(self, run: RunId) -> list[RevealedSum]:
        """Every sum of this run that the site has revealed shares of."""
        ...

    def revealed_of_all_runs(self) -> dict[RunId, list[RevealedSum]]: ...


class SumChecks:
    """The checks of a new sum against those that an update of this client may be in.

    The argument `members` of its checks holds the names on the list that the policy names; None if it names none.
    `warns`: whether the log says what the policy only warns of.
    """

    def __init__(self, run: RunId, policy: SitePolicy, kept: KeptSums, *, warns: bool = True) -> None:
        self._run = run
        self._policy = policy
        self._kept = kept
        self._warns = warns
        self._warned_of = set[int]()  # hashes of terms, and of pairs of client sets, which may have many long names

    @property
    def is_empty(self) -> bool:
        return not self._kept.sums(self._run)

    # --- checks ---

    def check_invitation(self, invitation: SecureInvitation, members: Collection[str] | None = None) -> None:
        """Raise `AttemptRefused` if the attempt's sum would be refused whichever clients of its cohort report."""
        invited = set(invitation.context.names)
        if not self._policy.relies_on(invitation.offer.plan.noise):
            if _has_updates(invitation):
                self._check_second_update(invitation)
            for run, one in self._bound_by(invitation):
                before = _counted(one.clients, members)
                if not invited.issuperset(before):
                    self._check_same_model(invitation, run, one, before, invited)
        earlier = [_earlier(invitation, one, one.cohort, members) for one in self._near(invitation)]
        earlier += self._over_same_model(invitation, members)
        self._check_change(invitation, frozenset(invited), earlier)
        self._check_terms(invitation, frozenset(invited), members)

    def check_attempt(self, invitation: SecureInvitation) -> None:
        """Raise `AttemptRefused` if a remembered sum, of any run, has the id of this attempt."""
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
        """Raise `AttemptRefused` if the sum over these clients is refused."""
        if not self._policy.relies_on(invitation.offer.plan.noise):
            for run, one in self._bound_by(invitation):
                self._check_same_model(invitation, run, one, _counted(one.clients, members), clients)
        signed = [one for one in self._near(invitation) if one.clients]
        earlier = [_earlier(invitation, one, one.clients, members) for one in signed]
        earlier += self._over_same_model(invitation, members)
        self._check_change(invitation, frozenset(clients), earlier)
        self._check_terms(invitation, frozenset(clients), members)

    # --- the rules applied ---

    def _check_other_runs(
        self, invitation: SecureInvitation, clients: Collection[str], members: Collection[str] | None
    ) -> None:
        """Raise `AttemptRefused` if the sum over these clients is refused because of what another run has revealed."""
        if self._policy.relies_on(invitation.offer.plan.noise):
            return
        for run, one in self._bound_by(invitation):
            if run != self._run:
                self._policy.check_second_update(one.round, run)
                self._check_same_model(invitation, run, one, _counted(one.clients, members), clients)
        self._check_change(invitation, frozenset(clients), self._over_same_model(invitation, members))

    def _check_second_update(self, invitation: SecureInvitation) -> None:
        """Apply the policy if shares were revealed of this round, of a later one, or of a sum over this model."""
        offer = invitation.assignment
        newest = max((one.round for one in self._kept.revealed(self._run) if one.has_updates), default=0)
        if offer.round <= newest:
            self._policy.check_second_update(newest)
        for run, one in self._bound_by(invitation):
            self._policy.check_second_update(one.round, "" if run == self._run else run)

    def _check_same_model(
        self, invitation: SecureInvitation, run: RunId, one: RevealedSum, before: Collection[str], now: Collection[str]
    ) -> None:
        place = f"round {one.round} of run {run!r}"
        check_same_model(self._policy, before, now, _n_invited(invitation, one), place)

    def _check_terms(self, invitation: SecureInvitation, now: frozenset[str], members: Collection[str] | None) -> None:
        """Refuse a sum, or warn of it, if a revealed sum of the run has nearly the same clients and other terms."""
        if self._policy.relies_on(invitation.offer.plan.noise) and self._policy.terms_change is None:
            return
        if not _has_updates(invitation):
            return  # the terms are those of a training
        terms = terms_sha256(invitation)
        for one in self._kept.revealed(self._run):
            if not one.has_updates or one.terms_sha256 in ("", terms):  # older versions of umbel stored no terms
                continue
            before, n_invited = _counted(one.clients, members), _n_invited(invitation, one)
            found = check_terms_change(self._policy, before, now, n_invited, f"round {one.round}")
            if found is not None and self._warns and hash(terms) not in self._warned_of:
                log.warning("round %d: %s.%s", invitation.assignment.round, found, _KEEP_TERMS)
                self._note([hash(terms)])

    def _check_change(self, invitation: SecureInvitation, now: frozenset[str], earlier: Iterable[_Earlier]) -> None:
        """Refuse clients that are too close to a sum whose shares were revealed, or warn. Of other sums only warn.

        Each pair of client sets is warned of once, by the closest sum.
        """
        if self._policy.relies_on(invitation.offer.plan.noise) and self._policy.cohort_change is None:
            return
        policy = self._policy
        near = list[_Earlier]()
        for one in sorted(earlier, key=lambda one: not one.is_binding):
            check = check_cohort_change if one.is_binding else cohort_change_between
            if check(policy, one.clients, now, one.name) is not None:
                near.append(one)
        new = [one for one in near if _pair(one.clients, now) not in self._warned_of]
        if new and self._warns:
            nearest = min(new, key=lambda one: len(one.clients ^ now))
            log.warning(
                "round %d: %s. In the same way, a round without this site would reveal this site's %s.%s%s",
                invitation.assignment.round,
                cohort_change_between(policy, nearest.clients, now, nearest.name),
                "update" if _has_updates(invitation) and nearest.has_updates else "metrics",
                "" if policy.refuses_cohort_change else _KEEP_OUT,
                _AVOID,
            )
        self._note([_pair(one.clients, now) for one in near])

    def _note(self, warned_of: Collection[int]) -> None:
        """Note warnings. A repeated warning is better than a full memory."""
        if len(self._warned_of) > _WARNED_MAX:
            self._warned_of.clear()
        self._warned_of.update(warned_of)

    def _bound_by(self, invitation: SecureInvitation) -> list[tuple[RunId, RevealedSum]]:
        """The sums over the same model and of the same kind, of any run and however old, that this client revealed
        shares of.
        """
        return [one for one in self._over_model(invitation) if one[1].has_updates is _has_updates(invitation)]

    def _over_model(self, invitation: SecureInvitation) -> list[tuple[RunId, RevealedSum]]:
        model, every = invitation.assignment.model.sha256, self._kept.revealed_of_all_runs()
        return [(run, one) for run, sums in every.items() for one in sums if one.model_sha256 == model]

    def _near(self, invitation: SecureInvitation) -> list[RememberedSum]:
        """The newest sums of this run that have something in common with the new one."""
        return [one for one in self._kept.sums(self._run) if _have_common(invitation, one)]

    def _over_same_model(self, invitation: SecureInvitation, members: Collection[str] | None) -> list[_Earlier]:
        """Sums of the other kind over this model, of other runs, and of this one if they are not among its newest:
        training and evaluation both measure it.
        """
        kind, newest = _has_updates(invitation), {one.attempt_id for one in self._kept.sums(self._run)}
        return [
            _Earlier(f"{_name(one)} of run {run!r}", True, frozenset(_counted(one.clients, members)), one.has_updates)
            for run, one in self._over_model(invitation)
            if one.has_updates is not kind
            and (run != self._run or one.attempt_id not in newest)
            and _have_common(invitation, one)
        ]


class EarlierSums(SumChecks):
    """The sums that an update of this client may be in, kept on disk, and their checks."""

    def __init__(self, run: RunId, policy: SitePolicy, kept: SecureStore) -> None:
        super().__init__(run, policy, kept)
        self._store = kept
        self._own: RememberedSum | None = None  # the entry of the attempt under way, if this process made it

    def sending(self, invitation: SecureInvitation) -> None:
        """Remember, before the masked update is sent, that it may be in a sum; this client may never see which."""
        offer, names = invitation.assignment, tuple(invitation.context.names)
        key = secrets.token_hex(_KEY_BYTES)
        one = RememberedSum(key, invitation.context.attempt_id, offer.round, offer.model.sha256, names)
        self._remember(replace(one, terms_sha256=terms_sha256(invitation), has_updates=_has_updates(invitation)))

    def signing(self, invitation: SecureInvitation, clients: Collection[str]) -> None:
        """Remember the sum's clients, before they are signed."""
        self._remember(replace(self._own_of(invitation), clients=tuple(clients)))

    def revealing(self, invitation: SecureInvitation, members: Collection[str] | None = None) -> None:
        """Remember that shares are revealed, before they are sent.

        Two runs of a site may be at work at the same time. So what other runs have revealed since the sum was signed is
        checked again. Raises `AttemptRefused`.
        """
        with self._store.alone():
            own = self._own_of(invitation)
            try:
                self._check_other_runs(invitation, own.clients, members)
            except AttemptRefused as error:
                raise AttemptRefused(f"this client reveals no shares of this sum: {error}") from error
            self._remember(replace(own, is_revealed=True))

    def _remember(self, one: RememberedSum) -> None:
        self._store.remember(self._run, one)
        self._own = one

    def _own_of(self, invitation: SecureInvitation) -> RememberedSum:
        """The entry of this attempt. Raises `LookupError` if this process sent nothing in it."""
        if self._own is None or self._own.attempt_id != invitation.context.attempt_id:
            raise LookupError("no update was sent in this attempt")
        return self._own


def not_signed(error: AttemptRefused) -> AttemptRefused:
    """The refusal of a sum whose masked update is already sent."""
    return AttemptRefused(f"this client does not sign this sum and reveals no shares: {error}")


def _pair(before: frozenset[str], now: frozenset[str]) -> int:
    return hash(frozenset((before, now)))


def _n_invited(invitation: SecureInvitation, one: RevealedSum) -> int:
    """The size of the larger of the two cohorts."""
    return max(len(invitation.context.cohort), one.n_invited)


def _earlier(
    invitation: SecureInvitation, one: RememberedSum, clients: Collection[str], members: Collection[str] | None
) -> _Earlier:
    """`clients`: of the sum, or of its cohort."""
    is_again = one.round == invitation.assignment.round and one.has_updates is _has_updates(invitation)
    attempt = "an earlier attempt at " if is_again else ""
    counted = frozenset(_counted(clients, members))
    return _Earlier(f"{attempt}{_name(one)}", one.is_revealed, counted, one.has_updates)


def _name(one: RememberedSum | RevealedSum) -> str:
    return f"round {one.round}" if one.has_updates else f"the evaluation of round {one.round}"


def _has_updates(invitation: SecureInvitation) -> bool:
    """Whether the clients send updates. In an evaluation they send only metrics."""
    return invitation.assignment.task.sends_updates


def _have_common(invitation: SecureInvitation, one: RememberedSum | RevealedSum) -> bool:
    """Whether both sums have updates, or both may have metrics of held-out data.

    It is not remembered whether a training measured the model, so every training counts as one that did.
    """
    return one.has_updates or not _has_updates(invitation) or invitation.assignment.training.evaluate


def _counted(clients: Collection[str], members: Collection[str] | None) -> list[str]:
    """The clients of an earlier sum that count in a difference: those still on the member list, if there is one."""
    return [name for name in clients if members is None or name in members]


def terms_sha256(invitation: SecureInvitation) -> str:
    """The SHA-256, in hex, of the terms: the training and every bound that the coordinator sets on its result.

    It is stored on disk: a release that hashed anything else would stop every run.
    """
    offer, plan = invitation.assignment, invitation.offer.plan
    training = offer.training
    terms: dict[str, object] = {
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
    terms |= _later_terms(training)
    if invitation.assignment.tensors is not None:
        terms["tensors"] = invitation.assignment.tensors
    return hashlib.sha256(canonical(terms).encode()).hexdigest()


def _later_terms(training: TrainingPlan) -> Mapping[str, object]:
    """The terms that plans have gained, where they are not the default. A schedule of the learning rate is one term for
    all rounds, and so is a rule for mu: `check_offer` has compared the rate and mu with them.
    """
    given = ((name, getattr(training, name), default) for name, default in later_fields(TrainingPlan))
    changed: dict[str, object] = {
        f"training.{name}": value for name, value, default in given if value != default and name not in _MEASURED_LATER
    }
    if training.rate_plan is not None:
        changed["learning_rate"] = training.rate_plan.learning_rate
    if training.mu_rule is not None:
        changed["proximal_mu"] = training.mu_rule.proximal_mu
    return changed
