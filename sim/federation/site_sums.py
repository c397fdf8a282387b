"""The secure sums that simulated sites have been in, and the SDK's rules for a sum beside earlier ones.

A real site remembers its sums on its own disk (`client/state/secure_store.py`). Here each attempt is kept once, with
the clients that sent, signed and revealed, and a site's memory is what concerns it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from umbel.aggregation.plans.assignment import Assignment, SecureOffer
from umbel.aggregation.round.states import Training
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.types import ClientId, RunId
from umbel.client.policy.earlier_sums import SumChecks, terms_sha256
from umbel.client.policy.policy import SitePolicy
from umbel.client.state.secure_store import RememberedSum, RevealedSum, newest_sums
from umbel.client.wire.offers import SecureInvitation
from umbel.sim.secure.exchange import simulated_context


@dataclass(frozen=True, slots=True)
class PlayedSum:
    """One attempt at a secure round, as its sites remember it."""

    attempt_id: str
    round: int
    model_sha256: str  # of the model that was trained
    terms_sha256: str
    cohort: tuple[ClientId, ...]  # the invited clients
    clients: tuple[ClientId, ...]  # of the sum
    sent: frozenset[ClientId]  # clients that sent masked updates
    signed: frozenset[ClientId]  # of these, clients that signed the list of clients in the sum
    revealed: frozenset[ClientId]  # of these, clients that revealed shares
    has_updates: bool  # False: of an evaluation

    @classmethod
    def of(
        cls,
        invitation: SecureInvitation,
        clients: Sequence[ClientId],
        sent: frozenset[ClientId],
        signed: frozenset[ClientId],
        revealed: frozenset[ClientId],
    ) -> "PlayedSum":
        """The fields as above."""
        offer, context = invitation.assignment, invitation.context
        return cls(
            context.attempt_id,
            offer.round,
            offer.model.sha256,
            terms_sha256(invitation),
            context.names,
            tuple(clients),
            sent,
            signed,
            revealed,
            offer.task.sends_updates,
        )

    def as_remembered(self, client: ClientId) -> RememberedSum:
        """The entry of a client that sent a masked update."""
        return RememberedSum(
            self.attempt_id,
            self.attempt_id,
            self.round,
            self.model_sha256,
            self.cohort,
            self.clients if client in self.signed else (),
            client in self.revealed,
            self.terms_sha256,
            self.has_updates,
        )


@dataclass(frozen=True, slots=True)
class SumsOfSite:
    """The sums of one client in the simulated run, as `SecureStore` would give them. `played`: all of the run."""

    client: ClientId
    run: RunId
    played: Sequence[PlayedSum]

    def sums(self, run: RunId) -> tuple[RememberedSum, ...]:
        """The newest sums, the oldest first."""
        return tuple(newest_sums(self._all()))

    def revealed(self, run: RunId) -> list[RevealedSum]:
        """Every sum that the client has revealed shares of."""
        return [one.revealed for one in self._all() if one.is_revealed]

    def sums_of_all_runs(self) -> dict[RunId, tuple[RememberedSum, ...]]:
        return {self.run: self.sums(self.run)}

    def revealed_of_all_runs(self) -> dict[RunId, list[RevealedSum]]:
        return {self.run: self.revealed(self.run)}

    def _all(self) -> tuple[RememberedSum, ...]:
        return tuple(one.as_remembered(self.client) for one in self.played if self.client in one.sent)


def invitation_of(opened: Training, offer: Assignment, composition: Composition) -> SecureInvitation:
    """What every client of a secure attempt is asked. `offer`: what its assignments have in common."""
    assert opened.plan.secure is not None, "only secure rounds have invitations"
    context = simulated_context(opened, composition.layout)
    cohort = tuple((str(name), key) for name, key in context.cohort)
    commitment, window_s = context.opening_commitment, opened.plan.window_s
    secure = SecureOffer(context.attempt_id, commitment, cohort, "", window_s, opened.plan.secure)
    assignment = replace(offer, codec=opened.plan.codec, secure=secure)
    return SecureInvitation(context.names[0], assignment, secure, context, composition)


def checks_of(
    client: ClientId, policy: SitePolicy, played: Sequence[PlayedSum], invitation: SecureInvitation
) -> SumChecks:
    """A site's checks of a new sum against those that it was in. Nothing is logged of what a policy only warns of."""
    run = invitation.assignment.run
    return SumChecks(run, policy, SumsOfSite(client, run, played), warns=False)
