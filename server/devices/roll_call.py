"""Who of a run's fleet was not there when a round opened: a site that has fallen away is not to go unnoticed."""

from collections.abc import Collection, Sequence

from umbel.aggregation.round.states import Closing, Training
from umbel.aggregation.run.records import Absent, AbsentClient
from umbel.aggregation.types import ClientId
from umbel.server.devices.pacing import HELD_MAX
from umbel.server.store.stored import LiveRun
from umbel.server.store.waiters import FleetMember, WaiterStore

NAMED_MAX = 5


class RollCall:
    """Calls a run's fleet over once for each attempt at a round of training, soon after it has opened."""

    def __init__(self, waiters: WaiterStore) -> None:
        self._waiters = waiters
        self._called_for = 0
        self._absent: Absent | None = None

    async def call(self, live: LiveRun, now: float) -> None:
        """Find out who was absent, if the round is open and that was not done yet."""
        state = live.state
        if live.round_id == self._called_for or not isinstance(state, Training | Closing):
            return
        absent = None
        if state.plan.task.makes_model:  # a canary and an evaluation leave most clients out on purpose
            fleet = await self._waiters.fleet(live.name, now, HELD_MAX + 1)
            if len(fleet) <= HELD_MAX:  # the devices of a larger fleet are sent away: few are ever there
                absent = absent_from(fleet, state.cohort, state.opened_at, live.run.file.coverage.sites)
        self._called_for, self._absent = live.round_id, absent

    def absent_from(self, round_id: int) -> Absent | None:
        """Who was absent from this attempt; None where that is not known."""
        return self._absent if round_id == self._called_for else None


def absent_from(
    fleet: Sequence[FleetMember], cohort: Collection[ClientId], opened_at: float, sites: Collection[ClientId]
) -> Absent:
    """Those who were neither asked nor waiting when the round opened, nor came since."""
    missing = [one for one in fleet if one.client not in cohort and max(one.until, one.seen_at) < opened_at]
    by_weight = sorted(missing, key=lambda one: (one.client not in sites, -one.sample_count, one.client))
    named = tuple(AbsentClient(one.client, one.sample_count, one.heard_at) for one in by_weight[:NAMED_MAX])
    return Absent(len(missing), sum(one.sample_count for one in missing), named)
