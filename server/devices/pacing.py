"""When a client that finds no work should come back: `aggregation/round/pace.py`, fed with what this coordinator knows.

A fleet of at most `HELD_MAX` clients is not sent away: each waits on its connection and hears of the next round at
once. Of a larger one, those that come shortly before a round is expected wait for it; all others get a time to come.
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

HELD_MAX = 1000  # connections that cost nothing while nothing happens
LOOK_S = 10.0
_RECORDS = 9  # of the newest attempts that had a cohort


class Pacing:
    """What is known of one run's rhythm and population. Looked up anew now and then; roughly right is good enough.

    `population`: distinct clients that were here within a day.
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
        """An attempt has ended."""
        if record.selected:
            self._open_s.append(record.open_s)
            self._opened_at.append(record.opened_at)

    async def look(self) -> None:
        """Count the population, if that was not done just now."""
        if (now := self._clock.now()) - self._looked_at >= LOOK_S:
            self._looked_at = now
            self.population = await self._waiters.population(self._run, now)

    def send_away_s(self, state: RoundState, plan: RoundPlan, client: ClientId, wait_s: float) -> float | None:
        """In how many seconds this client should come back; None: it may wait here."""
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
        """The same for a client that has waited in vain: at once again, in a small fleet."""
        return self.send_away_s(state, plan, client, wait_s=-1.0) or least_s

    def _every_s(self, plan: RoundPlan) -> float:
        """From one opening to the next, as it was lately; the window, before that is known."""
        opened = list(self._opened_at)
        steps = [later - earlier for earlier, later in pairwise(opened) if later > earlier]
        return statistics.median(steps) if steps else plan.window_s
