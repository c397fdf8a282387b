"""Pace steering: when a client that gets no work should come back.

Bonawitz et al. 2019, "Towards Federated Learning at Scale: System Design", section 2.3: small populations are brought
together, so that enough of them wait at the same moment; large ones are spread, so that there is no thundering herd and
each comes only as often as the rounds need it. No client is remembered: the moment follows from the demand, the clock,
and a salted hash of its name.

A client stays away for a day at most (`RETRY_AFTER_MAX_S` in the client), so the load cannot be bounded below N / 10 h.

Let N be the population, k the clients that a round wants, R the time from one opening to the next, L the allowed load.
A client may come every N / L seconds at most. A check-in waits for h = `WAIT_S_MAX` seconds at most, so enough clients
wait at any moment if each comes every N min(R, h) / (m k) seconds, with a margin of m = 1.5. The longer of the two is
the cycle P.

- *Large*, P > R: time is divided into cycles of length P, the same for all. Each client comes once a cycle, at a moment
  drawn uniformly for each cycle. So after any herd the next cycle is even: N / P <= L check-ins a second are expected
  at every moment, with the scatter of a Poisson process.
- *Small*, P <= R: all are needed for every round. All come at the next opening, over N / L seconds; if that is now, or
  overdue, over the next N / L seconds.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import assert_never

from umbel.aggregation.messages import WAIT_S_MAX
from umbel.aggregation.round.states import Abandoned, Closing, Committed, Recruiting, RoundState, Training
from umbel.aggregation.types import ClientId

MARGIN = 1.5
COME_BACK_MIN_S = 1.0
NEEDED_MAX_S = 6 * 3600.0  # rounds that need a client less often still see it each night
_STEPS_PER_DOUBLING = 4


@dataclass(frozen=True, slots=True)
class Demand:
    """The demand for a run's clients."""

    population: int  # distinct clients of this run that were seen within a day
    wanted: int  # clients that a round asks
    opens_in_s: float  # until the next round is expected to ask; 0 while one does
    every_s: float  # from one opening to the next
    check_ins_per_s_max: float  # of this run, at all replicas together

    def __post_init__(self) -> None:
        if self.population < 1 or self.wanted < 1:
            raise ValueError(f"population and wanted must be at least 1, not {self.population} and {self.wanted}")
        for name in ("every_s", "check_ins_per_s_max"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0):
                raise ValueError(f"{name} must be positive, not {value}")
        if not (math.isfinite(self.opens_in_s) and self.opens_in_s >= 0):
            raise ValueError(f"opens_in_s must be zero or positive, not {self.opens_in_s}")

    @property
    def least_cycle_s(self) -> float:
        """The time in which all clients can come once, at the allowed load."""
        return self.population / self.check_ins_per_s_max

    @property
    def cycle_s(self) -> float:
        """The time between a client's check-ins: as the rounds need it, within the load."""
        needed_s = self.population * min(self.every_s, WAIT_S_MAX) / (MARGIN * self.wanted)
        return max(self.least_cycle_s, min(needed_s, NEEDED_MAX_S))

    @property
    def is_small(self) -> bool:
        """Whether every client is needed for every round, and the load allows it."""
        return self.cycle_s <= self.every_s


def come_back_s(demand: Demand, now: float, client: ClientId, salt: bytes) -> float:
    """Seconds until this client should check in again, `COME_BACK_MIN_S` at least.

    `now`: Unix seconds, roughly the same on all replicas. `salt`: a secret of the run, the same on all replicas, so
    that no client can choose a name that always comes first.
    """
    if not demand.is_small:
        wait_s = _in_next_cycle(demand.cycle_s, now, client, salt)
    elif demand.opens_in_s > 0:
        opens_at = now + demand.opens_in_s
        wait_s = demand.opens_in_s + demand.least_cycle_s * _phase(client, salt, "opening", int(opens_at))
    else:
        wait_s = _in_next_cycle(demand.least_cycle_s, now, client, salt)
    return max(COME_BACK_MIN_S, wait_s)


def opens_in_s(state: RoundState, now: float, typical_open_s: float | None) -> float:
    """When the next round is expected to ask for clients: 0 while one does, or is about to.

    `typical_open_s`: how long recent rounds were open (such as the median of `open_s`); None if unknown.
    """
    match state:
        case Recruiting(not_before=not_before):
            return max(0.0, not_before - now)
        case Training(opened_at=opened_at, closes_at=closes_at):
            expected_at = closes_at if typical_open_s is None else opened_at + typical_open_s
            return max(0.0, (expected_at if now < expected_at < closes_at else closes_at) - now)
        case Closing() | Committed() | Abandoned():
            return 0.0
        case _:
            assert_never(state)


def _in_next_cycle(cycle_s: float, now: float, client: ClientId, salt: bytes) -> float:
    length_s = _rounded_up(max(cycle_s, COME_BACK_MIN_S))
    cycle = math.floor(now / length_s) + 1
    return (cycle + _phase(client, salt, "cycle", cycle)) * length_s - now


def _rounded_up(cycle_s: float) -> float:
    """To the next quarter of an octave, so that small changes of an estimate do not move all cycles."""
    return math.pow(2.0, math.ceil(math.log2(cycle_s) * _STEPS_PER_DOUBLING - 1e-9) / _STEPS_PER_DOUBLING)


def _phase(client: ClientId, salt: bytes, purpose: str, number: int) -> float:
    """Evenly in [0, 1)."""
    label = f"umbel/pace/1\x1f{purpose}\x1f{number}\x1f{client}".encode()
    digest = hashlib.blake2b(label, key=salt[:64], digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
