"""Decide whether a site takes part in a round: by its policy, its consortium's member list, and its earlier rounds.

All checks come before the first message of a secure round, and before training.
"""

import logging
import os
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.phrases import counted
from umbel.aggregation.plans.assignment import Assignment
from umbel.aggregation.privacy.accounting import Ledger
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.errors import SecAggError
from umbel.aggregation.secagg.messages import Roster
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.numbers.contribution import CONTRIBUTION_SECRET_BYTES
from umbel.aggregation.trust.members import MemberList, MembersRefused
from umbel.aggregation.trust.public_keys import short_groups
from umbel.aggregation.types import RunId
from umbel.client.errors import Alarm, AttemptRefused, StrangersInvited, WorkRefused, alarm_of
from umbel.client.policy.decided import DecidedTerms
from umbel.client.policy.earlier_sums import EarlierSums
from umbel.client.policy.members_store import MembersStore, members_in_force
from umbel.client.policy.policy import SitePolicy
from umbel.client.policy.terms import Costs, ledger_with, secure_terms
from umbel.client.state.identity import Identity
from umbel.client.state.secure_store import Begun, SecureStore
from umbel.client.wire.offers import SecureInvitation

_SEED_BITS = 62  # every generator accepts these
log = logging.getLogger("umbel.client")


class SecureRandom:
    """A site's secret random draws for one attempt at a secure round."""

    def training_seed(self, _offer: Assignment) -> int:
        """A seed of the site's own. With the coordinator's seed, an update could be the same in two sums."""
        return secrets.randbits(_SEED_BITS)

    def contribution_secret(self, _offer: Assignment) -> bytes:
        """32 bytes for its dither and its noise."""
        return os.urandom(CONTRIBUTION_SECRET_BYTES)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A secure round that this site takes part in."""

    client: SecureClient
    composition: Composition
    seed: int  # for training
    secret: bytes = field(repr=False)  # for the contribution


class Site:
    """One site in one run. Without a policy it believes its coordinator about the other clients.

    Its constructor raises `WorkRefused` for a run that is not allowed, `MembersRefused`, and `OSError`.
    """

    def __init__(
        self,
        run: RunId,
        identity: Identity,
        policy: SitePolicy | None,
        state_dir: Path,
        kept: SecureStore,
        random: SecureRandom | None = None,
        *,
        decided: DecidedTerms | None = None,
    ) -> None:
        """`decided`: the site takes part because the run was listed with these terms; None: it saw none."""
        self.policy = policy or SitePolicy()
        self._has_policy = policy is not None
        self.run = run
        self._identity = identity
        self._state_dir = state_dir
        self._kept = kept
        self._random = random or SecureRandom()
        self.earlier_sums = EarlierSums(run, self.policy, kept)
        self._has_warned = False
        self._decided = decided
        self.policy.check_run(run)
        self._list = members_in_force(self.policy, state_dir)

    def check_plain(self, layout: Layout) -> None:
        """Raise `WorkRefused` if the policy or the decision requires secure rounds, or if the run has had some."""
        self.policy.check_plain_round(layout.n_values)
        if self._decided is not None:
            self._decided.check_plain()
        begun = self._kept.begun(self.run)
        if not self.earlier_sums.is_empty or (begun is not None and begun.assignment.startswith(f"{self.run}.")):
            raise WorkRefused(
                "this site has taken part in secure rounds of this run, and a round without secure aggregation would "
                "reveal what they hide"
            )

    def admit(self, invitation: SecureInvitation, layout: Layout) -> Admitted:
        """Take part in a secure round, or raise the reason to decline it: `WorkRefused`, `AttemptRefused` or `Alarm`.

        A private round is charged here, durably, because everything that follows may depend on this site's data.
        """
        with self._kept.alone():  # another run of the site must not spend the same rest of a budget
            return self._admit(invitation, layout)

    def revealing(self, invitation: SecureInvitation) -> None:
        """Remember that shares are revealed, before they are sent. Raises `AttemptRefused` if another run of this site
        has meanwhile revealed shares of a sum that could be subtracted.
        """
        self.earlier_sums.revealing(invitation, self._members())

    def _admit(self, invitation: SecureInvitation, layout: Layout) -> Admitted:
        self._kept.require_room()  # first, so that a full store is not read at each offer
        if self._decided is not None:
            self._decided.check_secure(invitation.offer.plan)
        context = invitation.context
        ledger = self._ledger_with(invitation)
        self._check_own_key(invitation)
        self._check_limits(invitation, context.names, layout, ledger)
        self._check_members(invitation)
        self.earlier_sums.check_invitation(invitation, self._members())
        begun = Begun(invitation.assignment.id, context.attempt_id)
        if self._kept.begun(self.run) == begun:
            raise AttemptRefused(
                "this client already began this attempt, and a restart or an error lost its keys; it can take part in "
                "the next attempt"
            )
        self.earlier_sums.check_attempt(invitation)
        try:
            client = self._identity.secure_client(context, self.policy.minimum_cohort)
        except SecAggError as error:
            raise alarm_of(error) from error
        self._kept.begin(
            self.run, begun
        )  # before charging: after a restart the attempt is declined, so nothing is charged twice
        if ledger is not None:
            self._kept.spend(self.run, ledger)
        seed = self._random.training_seed(invitation.assignment)
        return Admitted(client, invitation.composition, seed, self._random.contribution_secret(invitation.assignment))

    def check_roster(self, invitation: SecureInvitation, roster: Roster, layout: Layout) -> None:
        """Raise `AttemptRefused` unless the clients that advertised keys are within the limits."""
        names = invitation.context.names
        charged = self._kept.spent(self.run, self.policy.delta) if invitation.offer.plan.is_private else None
        self._check_limits(invitation, [names[advert.index] for advert in roster.adverts], layout, charged)

    def check_sum(self, invitation: SecureInvitation, clients: Collection[str]) -> None:
        """Raise `AttemptRefused` for a sum that, with an earlier one, could reveal one site's update."""
        self.earlier_sums.check_sum(invitation, clients, self._members())

    # --- the checks ---

    def _check_own_key(self, invitation: SecureInvitation) -> None:
        key = dict(invitation.context.cohort).get(invitation.client)
        if key != self._identity.public_key:
            raise Alarm(
                f"the cohort of round {invitation.assignment.round} lists another key for this client, or none, so "
                "somebody could act in its place. This client sends nothing in this attempt. Ask the coordinator's "
                "operator at once",
                "this client is not in the cohort with its own key",
            )

    def _check_limits(
        self, invitation: SecureInvitation, names: Collection[str], layout: Layout, ledger: Ledger | None
    ) -> None:
        """Raise `AttemptRefused` if other clients could be within the limits, `WorkRefused` if the run cannot be.

        `ledger`: the run's cost with this round; None without noise.
        """
        n_invited, costs = len(invitation.context.cohort), Costs(ledger, self._ledger_of_all_runs(ledger))
        terms = secure_terms(self.policy, invitation.offer.plan, names, n_invited, layout.n_values, costs)
        if self._has_policy:
            self.policy.check_secure_round(terms)
        else:
            self.policy.check_secure_limits(terms)

    def _ledger_with(self, invitation: SecureInvitation) -> Ledger | None:
        """The cost of the run's private rounds for this site, with this one; None for a round without noise."""
        noise = invitation.offer.plan.noise
        return ledger_with(self._kept.spent(self.run, self.policy.delta), noise) if noise else None

    def _ledger_of_all_runs(self, ledger: Ledger | None) -> Ledger | None:
        """The cost of all runs, with `ledger` for this one; None if no budget needs it."""
        if ledger is None or self.policy.epsilon_total is None:
            return None
        return self._kept.spent_beside(self.run, self._state_dir, self.policy.delta).plus(ledger)

    def _check_members(self, invitation: SecureInvitation) -> None:
        lists = self._lists()
        if not lists:
            self._warn_of_no_list()
            return
        named = invitation.context.members_sha256
        members = next((one for one in lists if one.sha256 == named), None)
        if members is None:
            raise WorkRefused(_bound_elsewhere(named, lists))
        wrong = [name for name, key in invitation.context.cohort if members.members.get(name) != key]
        if invitation.client in wrong:
            raise Alarm(
                f"this client, with its present key, is not on member list {members.words}. Ask an officer to compare "
                "the key's fingerprint (umbel fingerprint) and to list the key in the next epoch. This client sends "
                "nothing in this attempt",
                "this client is not on the member list with its own key",
            )
        if wrong:
            others = f" (and {counted(len(wrong) - 1, 'other')})" if len(wrong) > 1 else ""
            raise StrangersInvited(
                f"the cohort of round {invitation.assignment.round} has clients that are not on member list "
                f"{members.words}, or are there with another key: {wrong[0]!r}{others}. This client sends nothing in "
                "this attempt. The coordinator's operator must give the run its member list (umbel run create "
                "--members), so that the coordinator asks members only, or remove those clients (umbel client remove)"
            )

    # --- the member list ---

    def _lists(self) -> list[MemberList]:
        """The trusted lists: the newest epoch of the policy's list, or without a policy all that are pinned."""
        if self.policy.members is None:
            return MembersStore(self._state_dir).every()
        try:
            self._list = members_in_force(self.policy, self._state_dir)
        except (OSError, MembersRefused) as error:
            log.warning("%s; the member list accepted before stays in force", error)
        return [] if self._list is None else [self._list]

    def _members(self) -> Collection[str] | None:
        """The names on the policy's list when the round was admitted; None if the policy names no list.

        Lists that are pinned without a policy do not count, because the coordinator could choose among them.
        """
        return None if self._list is None else self._list.members.keys()

    def _warn_of_no_list(self) -> None:
        if not self._has_warned:
            log.warning(
                "this site has no member list, so a coordinator that lies could make up the other clients of a secure "
                "round; name the consortium's list in a policy (--policy)"
            )
        self._has_warned = True


def _bound_elsewhere(named: str, lists: Collection[MemberList]) -> str:
    """Why a round is declined that is bound to none of the lists that this site trusts."""
    trusted = " or ".join(one.words for one in lists)
    lines = " or ".join(f'members_sha256 = "{one.sha256}"' for one in lists)
    bound = f"another member list ({short_groups(named)})" if named else "no member list"
    return (
        f"this round names {bound}, but this site trusts {trusted}. Ask an officer which list is the newest. For this "
        f"site's list the run file needs {lines}"
    )
