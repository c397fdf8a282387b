"""The signs of life that clients give while they work on an assignment, as one replica sees them."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

from umbel.aggregation.round.silence import cut_s, quiet_s
from umbel.aggregation.types import ClientId
from umbel.server.clock import Clock
from umbel.server.devices.waiting import Heard, HeldRequest


@dataclass(slots=True)
class _Poller:
    """A client that has held a request for its assignment's status open."""

    last_at: float  # when its last such request began or ended, in Unix seconds
    n_held: int = 0  # such requests that are open now
    is_cut: bool = False  # whether the client disconnected from the last one
    longest_gap_s: float = 0.0  # between an answer and the next request


@dataclass(frozen=True, slots=True)
class _Left:
    """A quiet client that a round did not wait for."""

    heard_at: float  # its last sign of life, in Unix seconds
    window_s: float  # of the round
    round_id: int


class SignsOfLife:
    """The clients of one run's newest attempt that have held a status request open, and have not reported yet.

    A client is alive while such a request is open. After that, any request of it is a sign of life (`Heard`).
    `on_away`: called when a client has no status request open any more.
    """

    def __init__(self, heard: Heard, clock: Clock, on_away: Callable[[], None]) -> None:
        self._heard = heard
        self._clock = clock
        self._on_away = on_away
        self._round_id = 0
        self._watched: dict[ClientId, _Poller] = {}
        self._left: dict[ClientId, _Left] = {}  # quiet clients that a round did not wait for
        self._gaps: dict[ClientId, float] = {}  # the longest time that each of them was quiet before it came back
        self.n_away = 0  # watched clients without an open status request

    @contextmanager
    def watching(self, round_id: int, client: ClientId, line: HeldRequest) -> Generator[None]:
        """A status request of this client is open for the length of the block."""
        self._begin(round_id)
        one = self._entered(client)
        try:
            yield
        finally:
            one.n_held, one.last_at, one.is_cut = one.n_held - 1, self._clock.now(), line.is_gone
            if one.n_held == 0 and self._watched.get(client) is one:
                self.n_away += 1
                self._on_away()

    def asked(self, client: ClientId, round_id: int | None) -> None:
        """This client asks for the status of its assignment in this attempt; None: in one that is over.

        If a round went on without this client because it was silent, its return shows how long it can be quiet while
        it is alive. A client that asks only in a later attempt, or after more than the window, may have been dead.
        That must not make rounds wait longer when it dies again.
        """
        if (left := self._left.pop(client, None)) is None or round_id not in (None, left.round_id):
            return
        if (gap_s := self._clock.now() - left.heard_at) <= left.window_s:
            self._gaps[client] = max(self._gaps.get(client, 0.0), gap_s)

    def reported(self, client: ClientId) -> None:
        """The round no longer waits for this client."""
        one = self._watched.pop(client, None)
        if one is not None and one.n_held == 0:
            self.n_away -= 1

    def left_behind(self, clients: Iterable[ClientId], window_s: float) -> None:
        """A round with this window has closed without these silent clients."""
        for client in clients:
            one = self._watched.get(client)
            if one is not None and not one.is_cut:
                self._left[client] = _Left(max(one.last_at, self._heard.at(client)), window_s, self._round_id)

    def silent_at(self, client: ClientId, window_s: float, since: float) -> float:
        """When this client will be silent if nothing more is heard of it, in Unix seconds; inf if it cannot be.

        `since`: silence counts from here at the earliest.
        """
        one = self._watched.get(client)
        if one is None or one.n_held > 0:
            return float("inf")
        heard_at = self._heard.at(client)
        is_cut = one.is_cut and heard_at <= one.last_at
        longest_gap_s = max(one.longest_gap_s, self._gaps.get(client, 0.0))
        bound_s = cut_s(window_s) if is_cut else quiet_s(window_s, longest_gap_s)
        return max(one.last_at, heard_at, since) + bound_s

    def _begin(self, round_id: int) -> None:
        """Forget the clients of earlier attempts."""
        if round_id > self._round_id:
            self._round_id, self._watched, self.n_away = round_id, {}, 0

    def _entered(self, client: ClientId) -> _Poller:
        now = self._clock.now()
        if (one := self._watched.get(client)) is None:
            one = self._watched[client] = _Poller(now)
        elif one.n_held == 0:
            self.n_away -= 1
            if not one.is_cut:
                one.longest_gap_s = max(one.longest_gap_s, now - one.last_at)
        one.n_held += 1
        return one
