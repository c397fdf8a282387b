"""Chunks that are being taken in: how many at a time, and which must go, so that bodies without an end fill no disk.

Each takes a place before its first byte is read, and keeps it until it counts or is gone. A client's chunks of one run
take at most `EACH_MAX` places, all chunks of this process at most `bytes_max` bytes, by the lengths that they declare.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

from umbel.server.problems import Refused

EACH_MAX = 2
PATIENCE_S = 30.0
"""So long a chunk has its place for itself. Clients cut theirs to take two seconds."""


class Arrival:
    """One chunk on its way in. `owner`: its client and run."""

    __slots__ = ("_timeout", "came_at", "n_bytes", "owner")

    def __init__(self, owner: str, n_bytes: int) -> None:
        self.owner = owner
        self.n_bytes = n_bytes
        self.came_at = time.monotonic()
        self._timeout: asyncio.Timeout | None = None

    @asynccontextmanager
    async def receiving(self) -> AsyncGenerator[None]:
        """While its bytes come, it can be let go: then this raises `Refused`."""
        try:
            async with asyncio.timeout(None) as self._timeout:
                yield
        except TimeoutError as error:
            # The rest of the body stays unread, and nobody waits for this answer any more.
            raise _too_many("a newer chunk replaced this one", {"Connection": "close"}) from error
        finally:
            self._timeout = None

    @property
    def can_go(self) -> bool:
        return self._timeout is not None

    def let_go(self) -> None:
        assert self._timeout is not None, "it is asked whether it can go"
        self._timeout.reschedule(asyncio.get_running_loop().time())
        self._timeout = None


class Intake:
    """The chunks that this process is taking in, the oldest first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._here: dict[Arrival, None] = {}
        self._n_bytes = 0

    @contextmanager
    def place(self, owner: str, n_bytes: int) -> Generator[Arrival]:
        """A place for a chunk of `n_bytes`, for the length of the block.

        Of one owner the newest win: a client whose network failed asks again, and what it has lost is the oldest. Of
        several, who came first may finish, but not take more than `PATIENCE_S` for it while others wait. Raises
        `Refused` if nothing may go for it.
        """
        arrival = Arrival(owner, n_bytes)
        self._make_room(arrival)
        self._here[arrival] = None
        self._n_bytes += n_bytes
        try:
            yield arrival
        finally:
            self._forget(arrival)

    def _make_room(self, newcomer: Arrival) -> None:
        own = [one for one in self._here if one.owner == newcomer.owner]
        if len(own) >= EACH_MAX:
            newcomer.came_at = own[0].came_at  # it goes on in that one's place, and has had it for as long
            self._let_go(own, "this client's chunks before this one are still being checked")
        patient_until = time.monotonic() - PATIENCE_S
        while self._n_bytes + newcomer.n_bytes > self._bytes_max:
            late = [one for one in self._here if one.came_at <= patient_until]
            self._let_go(late, "the coordinator takes in as many chunks as it can hold")

    def _let_go(self, candidates: list[Arrival], why_not: str) -> None:
        """Let the oldest go that can."""
        oldest = next((one for one in candidates if one.can_go), None)
        if oldest is None:
            raise _too_many(f"{why_not}; try again in a second")
        oldest.let_go()
        self._forget(oldest)

    def _forget(self, arrival: Arrival) -> None:
        if arrival in self._here:
            del self._here[arrival]
            self._n_bytes -= arrival.n_bytes


def _too_many(detail: str, headers: dict[str, str] | None = None) -> Refused:
    return Refused("too-many-chunks", detail, {"Retry-After": "1", **(headers or {})})
