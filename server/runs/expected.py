"""The clients that a small round should wait for, as data for the machine.

A round that begins without a site exposes that site: the difference between its sum and the next one nearly shows what
the site sent (docs/decisions/0017-sums-that-could-be-subtracted.md). So the first round of a run with few clients waits
for all clients that are likely to come, for `wait_for_all_s`. Later attempts and evaluations wait for those that are
up.
"""

from collections.abc import Mapping, Sequence

from umbel.aggregation.round.cohort import Expected, able_of
from umbel.aggregation.round.states import Recruiting
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.types import ClientId
from umbel.server.devices.fitness import RunMembers
from umbel.server.devices.waiting import Bells, Heard
from umbel.server.services import Services
from umbel.server.store.waiters import FleetMember

ASKED_MAX = 100  # a round that asks more clients does not wait for each of them
AGENT_S = 60.0  # an agent that has asked for the open runs within this time may come to any run; it asks twice a minute
UP_S = 20.0  # a client counts as up for this long after its last contact, and at least for the round's patience
LATER_MAX_S = 60.0  # the longest wait of an attempt after the first for clients that are up
_LOOKED_AT_MAX = 1000


class ExpectedClients:
    """Finds the clients that a run's next round should wait for.

    A wait counts only while enough clients wait, because a run is often created long before its sites start. It goes on
    from where it was when a site returns, not from zero: else a client that never comes could delay a round again each
    time that another one restarts.
    """

    def __init__(self, services: Services, file: RunFile, members: RunMembers, bells: Bells, heard: Heard) -> None:
        """`heard`: of clients about this run."""
        self._services = services
        self._heard = heard
        self._file = file
        self._members = members
        self._bells = bells
        self._attempt: object = ()
        self._since = 0.0  # when the wait for this attempt would have begun without its interruptions, in Unix seconds
        self._looked_at = 0.0
        self._had_enough = False

    async def of(
        self, round_id: int, state: Recruiting, candidates: Sequence[Candidate], now: float
    ) -> Expected | None:
        """The clients to wait for; None if the plan's patience is all that counts."""
        plan, able = state.plan, able_of(state.plan, candidates)
        is_small = not plan.task.tries_clients and plan.n_wanted <= ASKED_MAX and self._file.wait_for_all_s > 0
        if not is_small or state.before or len(able) >= plan.n_wanted:
            return None
        self._count((round_id, state.since), now, has_enough=len(able) >= plan.minimum)
        since, here = max(self._since, state.since), frozenset(one.client for one in able)
        if plan.task.makes_model and plan.number == 1 and plan.attempt == 1:
            return await self._first(state, here, since, now)
        return await self._later(state, here, since, now) if len(able) >= plan.minimum else None

    def _count(self, attempt: object, now: float, *, has_enough: bool) -> None:
        """Count the time since the last look if enough clients waited then and wait now."""
        if attempt != self._attempt:
            self._attempt, self._since = attempt, now
        elif not (self._had_enough and has_enough):
            self._since += now - self._looked_at
        self._looked_at, self._had_enough = now, has_enough

    async def _first(self, state: Recruiting, here: frozenset[ClientId], since: float, now: float) -> Expected:
        """Every client that may still come."""
        until = since + self._file.wait_for_all_s
        waiters, run, sites = self._services.waiters, state.plan.run, self._file.coverage.sites
        if (members := await self._members.list()) is not None:
            names, unnamed = {*map(ClientId, members.members)}, 0
        else:
            tokens = await waiters.unused_tokens(now, _LOOKED_AT_MAX)
            known = {one.client for one in await waiters.fleet(run, now, _LOOKED_AT_MAX)}
            agents = sorted(self._services.agents.clients_since(now - AGENT_S))[:_LOOKED_AT_MAX]
            names = {*known, *await waiters.newcomers(run, now, _LOOKED_AT_MAX, agents)}
            names |= {ClientId(name) for name in tokens if name is not None}
            unnamed = tokens.count(None)
        missing = (names | {*sites}) - await self._services.turned_away.staying_away(run, now) - here
        others_until = self._others_until(state, len(here) + len(missing), since)
        return Expected(dict.fromkeys(sorted(missing), until), unnamed, until, others_until)

    async def _later(self, state: Recruiting, here: frozenset[ClientId], since: float, now: float) -> Expected:
        """The clients of the run that are up."""
        away = await self._services.turned_away.staying_away(state.plan.run, now)
        fleet = await self._services.waiters.fleet(state.plan.run, now, _LOOKED_AT_MAX)
        missing = [one for one in fleet if one.client not in here | away]
        until = self._until(missing, max(state.plan.patience_s, UP_S), now)
        latest, others_until = since + LATER_MAX_S, self._others_until(state, len(here) + len(missing), since)
        if state.plan.task.may_be_left_out:  # an evaluation is abandoned if it has not begun by then
            end = state.since + state.plan.patience_s
            latest, others_until = min(latest, end), min(others_until, end)
        up = {client: min(at, latest) for client, at in until.items() if at > now}
        return Expected(up, others_until=others_until)

    def _others_until(self, state: Recruiting, n_known: int, since: float) -> float:
        """How long the round waits for clients that nobody knows of. A run whose target in clients is known waits for
        none: over-selection would ask more, but a small run may have no more. Others may wait at another replica.
        """
        knows_all = n_known >= state.plan.target and self._services.replicas.is_alone
        return 0.0 if knows_all else since + state.plan.patience_s

    def _until(self, fleet: Sequence[FleetMember], up_s: float, now: float) -> Mapping[ClientId, float]:
        """Until when each client counts as up. What it does in other runs does not count: it may have denied this one.
        Of a client at another replica only its last contact of any kind is known.
        """
        heard, is_alone = self._heard, self._services.replicas.is_alone
        stored = {one.client: one.seen_at if is_alone else one.heard_at for one in fleet}
        return {
            client: (now if self._bells.is_heard(client) else max(at, heard.at(client))) + up_s
            for client, at in stored.items()
        }
