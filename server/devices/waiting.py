"""Requests that are held open, the bells that wake them, and the clients that wait for work.

Nothing here polls: a request listens for a bell, and the code that changes something rings it.
"""

import asyncio
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.types import Receive

from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.types import ClientId, RunId
from umbel.server.clock import Clock
from umbel.server.store.waiters import WaiterStore, Waiting

HELD_MAX = 4
HEARD_S = 600.0


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
    """The requests that each client holds open, at most `HELD_MAX`.

    When there are more, the oldest is answered: after a network failure, the oldest requests are the lost ones.
    """

    def __init__(self) -> None:
        self._held: dict[ClientId, list[HeldRequest]] = {}

    @contextmanager
    def open(self, client: ClientId, receive: Receive) -> Generator[HeldRequest]:
        """Register a request of this client for the length of the block."""
        line, held = HeldRequest(receive), self._held.setdefault(client, [])
        held.append(line)
        if len(held) > HELD_MAX:
            held.pop(0).let_go()
        try:
            yield line
        finally:
            if line in held:
                held.remove(line)
            if not held and self._held.get(client) is held:
                del self._held[client]
