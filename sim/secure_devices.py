"""The clients of a simulated secure round: each takes its steps when it has what they need, after its own time.

Some fall silent in the middle. That is all they do wrong; `tests/aggregation/secagg/` has those that cheat.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.contribution import Contribution
from umbel.aggregation.secagg.errors import SecAggError
from umbel.aggregation.secagg.masked_input import masked_input
from umbel.aggregation.secagg.server import Phase
from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.types import ClientId
from umbel.sim.stage import Stage

Made = TypeVar("Made")

_PHASES = tuple(Phase)
_WORK_S, _LATENCY_S, _BYTES_PER_S = 60.0, 0.05, 1e6  # medians


@dataclass(frozen=True, slots=True)
class Luck:
    """One client's in one round: seconds of training, seconds that each message takes, and the speed of its line.

    `silent_from`: the first phase in which nothing is heard of it; None if it stays to the end.
    """

    work_s: float
    latency_s: float
    bytes_per_s: float
    silent_from: Phase | None = None

    def speaks_in(self, phase: Phase) -> bool:
        return self.silent_from is None or _PHASES.index(phase) < _PHASES.index(self.silent_from)

    def travel_s(self, n_bytes: int) -> float:
        return self.latency_s + n_bytes / self.bytes_per_s


def lucks(n: int, seed: int, *, dropping: float) -> list[Luck]:
    """Of n clients, of whom so large a share falls silent, spread evenly over the five phases."""
    rng = np.random.default_rng(derive_seed(seed, "secure rounds"))
    gone = rng.permutation(n)[: round(dropping * n)]
    silent_from = {int(index): _PHASES[i % len(_PHASES)] for i, index in enumerate(gone)}
    work_s, latency_s = _WORK_S * rng.lognormal(0, 0.4, n), _LATENCY_S * rng.lognormal(0, 0.8, n)
    facts = zip(work_s, latency_s, _BYTES_PER_S * rng.lognormal(0, 0.8, n), strict=True)
    return [Luck(float(a), float(b), float(c), silent_from.get(i)) for i, (a, b, c) in enumerate(facts)]


@dataclass(frozen=True, slots=True)
class Message:
    """What a client sends in a phase. `signature`: of a masked input, beside it; elsewhere it is within the body."""

    client: ClientId
    phase: Phase
    body: bytes
    signature: bytes = b""


class Device:
    """One client: what it is told moves it on."""

    def __init__(
        self,
        stage: Stage,
        luck: Luck,
        contribution: Contribution,
        client: SecureClient,
        send: Callable[[Message], None],
    ) -> None:
        self.refusal = ""
        self._stage, self._luck, self._client, self._send = stage, luck, client, send
        self._contribution = contribution
        self._name = client.context.names[client.index]
        self._trained_at = stage.now + luck.latency_s + luck.work_s
        stage.plan(
            stage.now + luck.latency_s, lambda: self._speak(Phase.ADVERTISE_KEYS, lambda client: client.advertise())
        )

    def tell(self, phase: Phase, body: bytes) -> None:
        """What the coordinator has for this client, so that it can speak in that phase."""
        self._stage.down[self._name] += len(body)
        self._stage.plan(self._stage.now + self._luck.travel_s(len(body)), lambda: self._hear(phase, body))

    def _hear(self, phase: Phase, body: bytes) -> None:
        match phase:
            case Phase.SHARE_KEYS:
                self._speak(phase, lambda client: client.share(body))
            case Phase.MASKED_INPUT if self._luck.speaks_in(phase):
                self._take("open shares", lambda client: client.hear(body))
                self._stage.plan(self._trained_at, lambda: self._speak(phase, self._masked))
            case Phase.CONSISTENCY_CHECK:
                self._speak(phase, lambda client: client.agree(body))
            case Phase.UNMASKING:
                self._speak(phase, lambda client: client.reveal(body))
            case _:
                pass

    def _masked(self, client: SecureClient) -> bytes:
        return b"".join(masked_input(self._contribution, client))

    def _speak(self, phase: Phase, say: Callable[[SecureClient], bytes]) -> None:
        if not self._luck.speaks_in(phase) or (body := self._take(phase, say)) is None:
            return
        signature = b""
        if phase is Phase.MASKED_INPUT:
            signature = self._client.sign_input(hashlib.sha256(body).digest())
        message = Message(self._name, phase, body, signature)
        n_bytes = len(body) + len(signature)
        self._stage.up[self._name] += n_bytes
        self._stage.plan(self._stage.now + self._luck.travel_s(n_bytes), lambda: self._send(message))

    def _take(self, what: str, step: Callable[[SecureClient], Made]) -> Made | None:
        """Take a step, unless the client has left the round or does so now."""
        if self.refusal:
            return None
        with self._stage.counting(f"clients: {what}"):
            try:
                return step(self._client)
            except SecAggError as error:
                self.refusal = str(error)
                return None
