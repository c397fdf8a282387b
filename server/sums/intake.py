"""Limits on the chunks that are being received, so that bodies that never end do not fill the disk.

Each chunk takes a place before its first byte is read, and keeps it until the chunk counts or is dropped. A client has
at most `EACH_MAX` places for one run. All chunks of this process have at most `bytes_max` bytes, by their declared
lengths.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

from umbel.server.problems import Refused

EACH_MAX = 2
PATIENCE_S = 30.0
"""How long a chunk keeps its place while others wait. Clients choose chunks that take two seconds to send."""


class Arrival:
    """One chunk that is being received. `owner`: its client and run."""

    __slots__ = ("_timeout", "came_at", "n_bytes", "owner")

    def __init__(self, owner: str, n_bytes: int) -> None:
        self.owner = owner
        self.n_bytes = n_bytes
        self.came_at = time.monotonic()
        self._timeout: asyncio.Timeout | None = None

    @asynccontextmanager
    async def receiving(self) -> AsyncGenerator[None]:
        """Receive the body in this block. Raises `Refused` if the chunk loses its place meanwhile."""
        try:
            async with asyncio.timeout(None) as self._timeout:
                yield
        except TimeoutError as error:
            # The rest of the body stays unread, so the connection must close.
            raise _too_many("a newer chunk replaced this one", {"Connection": "close"}) from error
        finally:
            self._timeout = None

    @property
    def can_go(self) -> bool:
        return self._timeout is not None

    def let_go(self) -> None:
        assert self._timeout is not None, "`can_go` is checked first"
        self._timeout.reschedule(asyncio.get_running_loop().time())
        self._timeout = None


class Intake:
    """The chunks that this process is receiving, the oldest first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._here: dict[Arrival, None] = {}
        self._n_bytes = 0

    @contextmanager
    def place(self, owner: str, n_bytes: int) -> Generator[Arrival]:
        """Reserve a place for a chunk of `n_bytes` during the block.

        A new chunk replaces the oldest of the same owner, because a client whose network failed sends it again. It
        replaces a chunk of another owner only after `PATIENCE_S`. Raises `Refused` if it can replace none.
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
            newcomer.came_at = own[0].came_at  # it inherits that chunk's place, with its age
            self._let_go(own, "this client's chunks before this one are still being checked")
        patient_until = time.monotonic() - PATIENCE_S
        while self._n_bytes + newcomer.n_bytes > self._bytes_max:
            late = [one for one in self._here if one.came_at <= patient_until]
            self._let_go(late, "the coordinator is receiving as many chunks as it can hold")

    def _let_go(self, candidates: list[Arrival], why_not: str) -> None:
        """Drop the oldest of these that can be dropped."""
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
