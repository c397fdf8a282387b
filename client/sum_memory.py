"""What two sums with this client in them could tell together of one site, and which are refused for it.

Sums cannot be taken back, and they can be subtracted: of two sums over the same updates, of which one lacks a client,
the difference is that client's update. Three things stand against it.

*No update twice.* The site trains from a seed that it draws itself (`Site.admit`), so its update to one model is
another one each time, though near the last: what is said below is about updates that are near, not equal.

*One model.* Updates to one and the same model differ by the chance of their training alone, so the difference of two
such sums is nearly that of the clients by whom they differ. A sum over a model of which shares of another sum were
revealed is refused if the clients of the two differ by any, but by fewer than `minimum_cohort`: the least that a sum
may hide an update among, and the difference is a sum, too. The very same clients are allowed, so a round whose sum was
opened in vain can be made again, and so can one after a rollback.

- What binds is what this client has *revealed*. A sum opens when t clients reveal shares, t being more than (n + c) /
  2 (`parameters.py`), so two sums over all but one of the same clients would need an honest client to reveal shares of
  both: there is always one that refuses the second, also where most were never asked about the first. (Up to 300
  clients; with c of the clients corrupt, which is the worst. For each that is not, two clients more may differ.)
- A sum that this client has signed, and no more, binds nobody: too few may have signed, and while those who fell silent
  are away the clients that are left could never go on. The others that revealed shares of it, if any did, refuse.
- A sum that this client was never told of may be of any of its cohort. Nothing is certain of it, and every attempt that
  fails for want of reports leaves one behind, so it is a warning at most.
- An invitation is refused at once if the sum cannot be of the same clients as before, and would be too near; else it
  hangs on who comes, and the sum is looked at when it is told, before it is signed.

*Several models.* From round to round models differ, and so do updates, the less the further a run is. What differs by
few clients is a warning, or with `cohort_change = "refuse"` a refusal, against every sum that is remembered.

What this does not do: a coordinator that changes one bit of the model has another model. Three sums or more, of which
each two differ by many, can be added and subtracted to leave one client; no client need be in all of them. Against
both there is `cohort_change = "refuse"`, in part, and noise. In a private run whose cost the site counts the noise is
there and each attempt is charged, so nothing is refused but what the policy's `cohort_change` says.
"""

import logging
from collections.abc import Collection, Iterable
from dataclasses import replace

from umbel.aggregation.types import RunId
from umbel.client.policy import SitePolicy
from umbel.client.secure_offer import Asked
from umbel.client.secure_store import RememberedSum, SecureStore

log = logging.getLogger("umbel.client")


class SumMemory:
    """The sums of one run that an update of this client may be in. Kept on disk: a restart forgets nothing."""

    def __init__(self, run: RunId, policy: SitePolicy, kept: SecureStore) -> None:
        self._run = run
        self._policy = policy
        self._kept = kept
        self._warned_in = 0  # the round

    @property
    def is_empty(self) -> bool:
        return not self._kept.sums(self._run)

    # --- what is asked ---

    def check_invitation(self, asked: Asked) -> None:
        """Raise `AttemptRefused` for an attempt whose sum must not be, whoever comes of its cohort."""
        invited, sums = set(asked.context.names), self._kept.sums(self._run)
        if not self._is_budgeted(asked):
            self._check_second_update(asked, sums)
            for one in self._bound_by(asked, sums):
                if not invited.issuperset(one.clients):
                    self._policy.check_same_model(one.clients, invited)
        known = [one.cohort for one in sums if one.clients]
        self._check_change(asked, invited, known, [one.cohort for one in sums if not one.clients])

    def check_sum(self, asked: Asked, clients: Collection[str]) -> None:
        """The same of the sum, now that it is told whose it is."""
        sums = [one for one in self._kept.sums(self._run) if one.attempt_id != asked.context.attempt_id]
        if not self._is_budgeted(asked):
            for one in self._bound_by(asked, sums):
                self._policy.check_same_model(one.clients, clients)
        self._check_change(asked, set(clients), [one.clients for one in sums if one.clients])

    # --- what happens ---

    def sending(self, asked: Asked) -> None:
        """Before the masked update is sent: from then on it may be in a sum that this client is not told of."""
        offer = asked.assignment
        names = tuple(asked.context.names)
        self._kept.remember(self._run, RememberedSum(asked.context.attempt_id, offer.round, offer.model.sha256, names))

    def signing(self, asked: Asked, clients: Collection[str]) -> None:
        """Before it is signed whose sum it is."""
        self._kept.remember(self._run, replace(self._own(asked), clients=tuple(clients)))

    def revealing(self, asked: Asked) -> None:
        """Before shares are sent."""
        self._kept.remember(self._run, replace(self._own(asked), is_revealed=True))

    # --- the rules ---

    def _check_second_update(self, asked: Asked, sums: Iterable[RememberedSum]) -> None:
        """The policy's word where shares were revealed of the round, of one after it, or of the model."""
        offer = asked.assignment
        revealed = [one for one in sums if one.is_revealed]
        newest = max((one.round for one in revealed), default=0)
        if offer.round <= newest:
            self._policy.check_second_update(newest)
        for one in self._bound_by(asked, revealed):
            self._policy.check_second_update(one.round)

    def _check_change(
        self,
        asked: Asked,
        now: Collection[str],
        known: Iterable[Collection[str]],
        unknown: Iterable[Collection[str]] = (),
    ) -> None:
        """Raise `AttemptRefused` for clients too near to some that are known, or warn, once a round; of those that are
        not known, warn.
        """
        near = [clients for clients in known if self._policy.check_cohort_change(clients, now) is not None]
        near += [clients for clients in unknown if self._policy.cohort_change_between(clients, now) is not None]
        if near and self._warned_in != asked.assignment.round:
            self._warned_in = asked.assignment.round
            nearest = min(near, key=lambda clients: len(set(clients) ^ set(now)))
            log.warning("round %d: %s", self._warned_in, self._policy.cohort_change_between(nearest, now))

    def _bound_by(self, asked: Asked, sums: Iterable[RememberedSum]) -> list[RememberedSum]:
        """Those over the same model of which this client has revealed shares."""
        model = asked.assignment.model.sha256
        return [one for one in sums if one.is_revealed and one.model_sha256 == model]

    def _is_budgeted(self, asked: Asked) -> bool:
        return asked.offer.plan.noise is not None and self._policy.epsilon is not None

    def _own(self, asked: Asked) -> RememberedSum:
        return next(one for one in self._kept.sums(self._run) if one.attempt_id == asked.context.attempt_id)
