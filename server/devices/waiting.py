"""Requests that are held open, the bells that wake them, and the clients that wait for work.

Nothing here polls: a request listens for a bell, and the code that changes something rings it. In a fleet of at most
`FLEET_HELD_MAX` clients, each client waits on its connection and is answered as soon as a round opens. In a larger
fleet only clients that come shortly before the next round wait. All others are told when to come back
(`aggregation/round/pace.py`).
"""

import asyncio
import statistics
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from starlette.types import Receive

from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.round.pace import Demand, come_back_s, opens_in_s
from umbel.aggregation.round.states import RoundState
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.run.records import RoundRecord
from umbel.aggregation.types import ClientId, RunId
from umbel.server.clock import Clock
from umbel.server.store.waiters import WaiterStore, Waiting

HELD_PER_CLIENT_MAX = 4
HEARD_S = 600.0
FLEET_HELD_MAX = 1000  # idle connections cost almost nothing
LOOK_S = 10.0
_RECORDS = 9  # of the newest attempts that had a cohort


class Bells:
    """One bell for each name; any number of requests may listen for it."""

    def __init__(self) -> None:
        self._listening: dict[str, set[asyncio.Event]] = {}

    @contextmanager
    def listen(self, name: str) -> Generator[asyncio.Event]:
        """An event that the next ring sets."""
        event = asyncio.Event()
        self._listening.setdefault(name, set()).add(event)
        try:
            yield event
        finally:
            others = self._listening[name]
            others.discard(event)
            if not others:
                del self._listening[name]

    def ring(self, names: Iterable[str]) -> None:
        for name in names:
            for event in self._listening.get(name, ()):
                event.set()

    def ring_all(self) -> None:
        self.ring(tuple(self._listening))

    def is_heard(self, name: str) -> bool:
        """Whether a request is listening for this bell now."""
        return name in self._listening


@dataclass(slots=True)
class Waiter:
    """One client in the waiting room. `held`: number of its check-ins that are held open here."""

    client: ClientId
    seen_at: float
    held: int = 0


class WaitingRoom:
    """The clients that wait for work in one run, at any replica.

    A client waits while its check-in is held open. After an answer without work it counts as waiting until it was told
    to come back, and a little longer. A client that disconnects leaves at once. The list is in the database, because
    every replica draws cohorts from it; this object has only what this replica needs to maintain it.
    """

    def __init__(self, run: RunId, waiters: WaiterStore, clock: Clock) -> None:
        self._run = run
        self._store = waiters
        self._clock = clock
        self._here: dict[ClientId, Waiter] = {}

    def entry(self, candidate: Candidate, stays_s: float) -> Waiting:
        """The row of a client that waits for `stays_s` from now on; 0: it was here, and should come back later."""
        now = self._clock.now()
        return Waiting(self._run, candidate.client, candidate.sample_count, candidate.tier, now, now + stays_s)

    def enter(self, entry: Waiting) -> Waiter:
        """A check-in of this client is held open from now on; its entry is stored."""
        waiter = self._here.setdefault(entry.client, Waiter(entry.client, entry.seen_at))
        waiter.seen_at = entry.seen_at
        waiter.held += 1
        return waiter

    def leave(self, waiter: Waiter, still_waits: bool) -> None:
        """End a check-in. The client still waits if it has another one, here or at another replica."""
        waiter.held -= 1
        if waiter.held <= 0 and self._here.get(waiter.client) is waiter:
            del self._here[waiter.client]
            if not still_waits:
                self._store.note(Waiting(self._run, waiter.client, 0, "", waiter.seen_at, 0.0, has_left=True))

    def is_here(self, client: ClientId) -> bool:
        """Whether a check-in of this client is held open at this replica."""
        return client in self._here

    async def expel(self, client: ClientId) -> None:
        """Remove a client from the waiting room."""
        await self._store.put(Waiting(self._run, client, 0, "", self._clock.now(), 0.0))

    async def count(self) -> int:
        """The number of clients that wait now."""
        return await self._store.count(self._run, self._clock.now())

    async def candidates(self) -> tuple[Candidate, ...]:
        return await self._store.candidates(self._run, self._clock.now())


class Heard:
    """The time of each client's last contact with this replica, in Unix seconds.

    Entries are dropped 10 to 20 minutes after the last contact; by then the database has the time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = self._turned_at = clock.now()
        self._lately: dict[str, float] = {}
        self._before: dict[str, float] = {}

    def note(self, client: str) -> None:
        if (now := self._clock.now()) - self._turned_at >= HEARD_S:
            self._before, self._lately, self._turned_at = self._lately, {}, now
        self._lately[client] = now

    def at(self, client: str) -> float:
        """The client's last contact; the start of the coordinator if there was none since."""
        return self._lately.get(client) or self._before.get(client, self._since)

    def clients_since(self, time_s: float) -> set[str]:
        """The clients that this replica has heard since then; after ten minutes some are left out."""
        return {client for heard in (self._lately, self._before) for client, at in heard.items() if at >= time_s}

    def __len__(self) -> int:
        """The number of entries; a client of the last ten minutes may have two."""
        return len(self._lately) + len(self._before)


class HeldRequest:
    """A request that is held open. `is_gone`: the peer has disconnected, or the request must be answered now."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._bell: asyncio.Event | None = None
        self.is_gone = False

    async def hold(self, clock: Clock, bell: asyncio.Event, timeout_s: float) -> None:
        """Wait for the bell, the timeout, or the peer to disconnect. The request's body must have been read."""
        self._bell = bell
        async with asyncio.TaskGroup() as group:  # it tells a cancelled watch from a cancelled request
            watch = group.create_task(self._watch())
            await clock.wait(bell, timeout_s)
            watch.cancel()

    def let_go(self) -> None:
        """Stop holding the request open: it is answered now."""
        self.is_gone = True
        if self._bell:
            self._bell.set()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.let_go()


class HeldRequests:
    """The requests that each client holds open, at most `HELD_PER_CLIENT_MAX` of one run, and as many of none.

    When there are more, the oldest is answered: after a network failure, the oldest requests are the lost ones.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[ClientId, str], list[HeldRequest]] = {}

    @contextmanager
    def open(self, client: ClientId, receive: Receive, run: str = "") -> Generator[HeldRequest]:
        """Register a request of this client for the length of the block. `run`: that it is about; empty for none."""
        line, held = HeldRequest(receive), self._held.setdefault((client, run), [])
        held.append(line)
        if len(held) > HELD_PER_CLIENT_MAX:
            held.pop(0).let_go()
        try:
            yield line
        finally:
            if line in held:
                held.remove(line)
            if not held and self._held.get((client, run)) is held:
                del self._held[client, run]


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
        if self.population <= FLEET_HELD_MAX:
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
