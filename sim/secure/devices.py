"""The clients of a simulated secure round in virtual time: each takes its steps once it has what they need.

Some fall silent in the middle. They do nothing else wrong; `tests/aggregation/secagg/` has clients that cheat.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from umbel.aggregation.secagg.errors import SecAggError
from umbel.aggregation.secagg.turns import Phase
from umbel.aggregation.types import ClientId


class VirtualTime:
    """A queue of events whose times move the clock; computation takes no virtual time."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.up: Counter[ClientId] = Counter()  # bytes
        self.down: Counter[ClientId] = Counter()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._n_planned = 0

    def plan(self, at: float, what: Callable[[], None]) -> None:
        """Plan an event; events of the same moment keep their order."""
        heapq.heappush(self._due, (max(at, self.now), self._n_planned, what))
        self._n_planned += 1

    def play(self, until: Callable[[], bool]) -> None:
        """Run events in order until `until()` or none is left."""
        while self._due and not until():
            self.now, _, what = heapq.heappop(self._due)
            what()


Made = TypeVar("Made")
Refuses: TypeAlias = Callable[[Phase, Sequence[ClientId]], str]

_PHASES = tuple(Phase)


@dataclass(frozen=True, slots=True)
class DeviceFate:
    """The timing of one client in one round, and when it falls silent, if ever."""

    work_s: float  # from when it hears of the round until its update; inf: it never has one
    latency_s: float  # of a round trip
    up_bytes_per_s: float
    down_bytes_per_s: float
    silent_from: Phase | None = None  # the first phase without its messages
    silent_at: float = math.inf  # the moment from which it is silent

    def speaks_in(self, phase: Phase) -> bool:
        return self.silent_from is None or _PHASES.index(phase) < _PHASES.index(self.silent_from)


@dataclass(frozen=True, slots=True)
class SecureMessage:
    """A client's message in a phase. `signature`: of a masked input; elsewhere it is within the body.

    `declined`: why it sends no message in this phase, and none later; empty if it does.
    """

    client: ClientId
    phase: Phase
    body: bytes
    signature: bytes = b""
    declined: str = ""


class Voice(Protocol):
    """A client's messages, step by step (`secagg/client.py`). A step raises `SecAggError` if the client leaves."""

    def advertise(self) -> bytes: ...
    def share(self, roster: bytes) -> bytes: ...
    def hear(self, inbox: bytes) -> None: ...
    def mask(self) -> tuple[bytes, bytes]:
        """Its update and its signature."""
        ...

    def agree(self, inputs: bytes) -> bytes: ...
    def reveal(self, agreements: bytes) -> bytes: ...


class SecureDevice:
    """One client, driven by the messages that it gets.

    `declines`: why it sends no update; empty if it sends one. `refuses`: why it leaves the round instead of its message
    in a phase that is about these clients; empty if it goes on. `sends_at`, `reports_at`: when its upload begins, and
    when its report, or its refusal, arrives; inf for never. `input_bytes`: of the upload, with the signature, which the
    SDK sends in its report.
    """

    def __init__(
        self,
        stage: VirtualTime,
        name: ClientId,
        luck: DeviceFate,
        voice: Voice,
        send: Callable[[SecureMessage], None],
        declines: str = "",
        refuses: Refuses = lambda _phase, _clients: "",
    ) -> None:
        self.refusal = self.declined = ""  # why it has left the round, and what it has told the coordinator of that
        self.sends_at = self.reports_at = math.inf
        self.input_bytes, self.said = 0, set[Phase]()  # `said`: the phases of its messages, also of those that are lost
        self._stage, self._name, self._luck, self._voice, self._send = stage, name, luck, voice, send
        self._declines, self._refuses = declines, refuses
        self._is_released = False
        self._trained_at = stage.now + luck.latency_s + luck.work_s
        stage.plan(stage.now + luck.latency_s, lambda: self._speak(Phase.ADVERTISE_KEYS, voice.advertise))

    def tell(self, phase: Phase, body: bytes, clients: Sequence[ClientId]) -> None:
        """Deliver what the client needs in that phase, which is about these clients."""
        if self._is_active(phase):
            self._stage.down[self._name] += len(body)
            travels_s = self._luck.latency_s + len(body) / self._luck.down_bytes_per_s
            self._stage.plan(self._stage.now + travels_s, lambda: self._hear(phase, body, clients))

    def release(self) -> None:
        """Stop the client."""
        self._is_released = True

    def _is_active(self, phase: Phase) -> bool:
        is_silent = self._stage.now >= self._luck.silent_at or not self._luck.speaks_in(phase)
        return not (is_silent or self._is_released or self.refusal)

    def _hear(self, phase: Phase, body: bytes, clients: Sequence[ClientId]) -> None:
        if not self._is_active(phase):
            return
        match phase:
            case Phase.SHARE_KEYS:
                self._speak(phase, lambda: self._voice.share(body), clients)
            case Phase.MASKED_INPUT:
                self._take(lambda: self._voice.hear(body))
                if math.isfinite(self._trained_at):
                    self._stage.plan(self._trained_at, self._upload)
            case Phase.CONSISTENCY_CHECK:
                self._speak(phase, lambda: self._voice.agree(body), clients)
            case Phase.UNMASKING:
                self._speak(phase, lambda: self._voice.reveal(body), clients)
            case _:
                pass

    def _upload(self) -> None:
        """Send the masked update, and then report it: two requests."""
        phase, luck = Phase.MASKED_INPUT, self._luck
        if not self._is_active(phase) or (made := self._take(self._voice.mask)) is None:
            return
        update, signature = made
        message = SecureMessage(self._name, phase, update, signature)
        if self._declines:
            message = SecureMessage(self._name, phase, b"", declined=self._declines)
        else:
            self.said.add(phase)
        self.sends_at, self.input_bytes = self._stage.now, len(message.body) + len(message.signature)
        self._stage.up[self._name] += self.input_bytes
        comes_at = self.sends_at + 2 * luck.latency_s + len(update) / luck.up_bytes_per_s
        if self._deliver(message, comes_at):
            self.reports_at = comes_at

    def _speak(self, phase: Phase, say: Callable[[], bytes], clients: Sequence[ClientId] = ()) -> None:
        if not self._is_active(phase):
            return
        if why := self._refuses(phase, clients):
            self._leave(phase, why)
            return
        if (body := self._take(say)) is None:
            return
        self.said.add(phase)
        self._stage.up[self._name] += len(body)
        travels_s = self._luck.latency_s + len(body) / self._luck.up_bytes_per_s
        self._deliver(SecureMessage(self._name, phase, body), self._stage.now + travels_s)

    def _leave(self, phase: Phase, why: str) -> None:
        """Decline in this phase, and say nothing more in this attempt."""
        self.refusal, comes_at = why, self._stage.now + self._luck.latency_s
        if self._deliver(SecureMessage(self._name, phase, b"", declined=why), comes_at):
            self.reports_at, self.declined = comes_at, why

    def _deliver(self, message: SecureMessage, at: float) -> bool:
        """Deliver a message then, unless its sender is silent before; whether it is delivered."""
        comes = at < self._luck.silent_at
        if comes:
            self._stage.plan(at, lambda: self._send(message))
        return comes

    def _take(self, step: Callable[[], Made]) -> Made | None:
        """Take a step; None if the client has left the round, or leaves it now."""
        if self.refusal:
            return None
        try:
            return step()
        except SecAggError as error:
            self.refusal = str(error)
            return None
