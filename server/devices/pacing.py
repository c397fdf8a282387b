"""When a client that finds no work should come back (`aggregation/round/pace.py`).

In a fleet of at most `HELD_MAX` clients, each client waits on its connection and is answered as soon as a round opens.
In a larger fleet only clients that come shortly before the next round wait. All others are told when to come back.
"""

import statistics
from collections import deque
from itertools import pairwise

from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.round.pace import Demand, come_back_s, opens_in_s
from umbel.aggregation.round.states import RoundState
from umbel.aggregation.run.records import RoundRecord
from umbel.aggregation.types import ClientId, RunId
from umbel.server.clock import Clock
from umbel.server.store.waiters import WaiterStore

HELD_MAX = 1000  # idle connections cost almost nothing
LOOK_S = 10.0
_RECORDS = 9  # of the newest attempts that had a cohort


class Pacing:
    """A run's pace and population, estimated from its newest attempts and from who checked in.

    `population`: distinct clients that checked in within a day.
    """

    def __init__(self, run: RunId, salt: bytes, waiters: WaiterStore, clock: Clock, check_ins_per_s_max: float) -> None:
        self._run = run
        self._salt = salt
        self._waiters = waiters
        self._clock = clock
        self._check_ins_per_s_max = check_ins_per_s_max
        self.population = 0
        self._looked_at = float("-inf")
        self._open_s: deque[float] = deque(maxlen=_RECORDS)
        self._opened_at: deque[float] = deque(maxlen=_RECORDS)

    def note(self, record: RoundRecord) -> None:
        """Add an attempt that has ended."""
        if record.selected:
            self._open_s.append(record.open_s)
            self._opened_at.append(record.opened_at)

    async def look(self) -> None:
        """Count the population, at most once in `LOOK_S`."""
        if (now := self._clock.now()) - self._looked_at >= LOOK_S:
            self._looked_at = now
            self.population = await self._waiters.population(self._run, now)

    def send_away_s(self, state: RoundState, plan: RoundPlan, client: ClientId, wait_s: float) -> float | None:
        """In how many seconds this client should come back; None if it may wait on its connection."""
        if self.population <= HELD_MAX:
            return None
        now = self._clock.now()
        typical_s = statistics.median(self._open_s) if self._open_s else None
        due_s = opens_in_s(state, now, typical_s)
        if due_s <= wait_s:
            return None
        demand = Demand(self.population, plan.n_wanted, due_s, self._every_s(plan), self._check_ins_per_s_max)
        return come_back_s(demand, now, client, self._salt)

    def come_back_s(self, state: RoundState, plan: RoundPlan, client: ClientId, least_s: float) -> float:
        """The same for a client that waited and got no work: `least_s` in a small fleet."""
        return self.send_away_s(state, plan, client, wait_s=-1.0) or least_s

    def _every_s(self, plan: RoundPlan) -> float:
        """Median time from one opening to the next; the window, before it is known."""
        opened = list(self._opened_at)
        steps = [later - earlier for earlier, later in pairwise(opened) if later > earlier]
        return statistics.median(steps) if steps else plan.window_s
