"""One secure round in virtual time: the coordinator's state machine, real clients, keys and masks.

Only the clock and the silence of clients are made up. All clients live in one process, so the signatures of a roster
are checked once and not by each of them; everything else every client does itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from umbel.aggregation.codec.modular import lift
from umbel.aggregation.plans.round import RoundPlan
from umbel.aggregation.round.machine import advance
from umbel.aggregation.round.states import (
    Abandoned,
    Applied,
    Closing,
    Committed,
    Gathered,
    Recruiting,
    RoundState,
    Training,
)
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.turns import RANDOM_BYTES, Exchange, Phase
from umbel.aggregation.seeds import derive_seed
from umbel.aggregation.types import ClientId
from umbel.sim.bench.secagg.cohort import client_name, made_contribution
from umbel.sim.secure.devices import DeviceFate, VirtualTime
from umbel.sim.secure.exchange import ExchangeParties, exchange, seeded_bytes
from umbel.sim.secure.voices import RealMasking

PHASES = tuple(Phase)
_WORK_S, _LATENCY_S, _BYTES_PER_S = 60.0, 0.05, 1e6  # medians
_SHA256 = "ab" * 32


@dataclass(frozen=True, slots=True)
class PlayedRound:
    """How a round went. `levels` (int32, of `bits`) and `words` (int64): the sums read; None if it was abandoned.

    `took_s`: virtual. `up`, `down`: bytes of message bodies, by client. `refusals`: why clients have left the round,
    in their words.
    """

    ended: Committed | Abandoned
    levels: Tensor | None = field(repr=False)
    words: Tensor | None = field(repr=False)
    took_s: float
    up: Mapping[ClientId, int]
    down: Mapping[ClientId, int]
    refusals: Mapping[ClientId, str]

    @property
    def exchange(self) -> Exchange | None:
        """Who has said what; None if the round was abandoned."""
        return self.ended.closing.exchange if isinstance(self.ended, Committed) else None

    @property
    def inputs(self) -> tuple[ClientId, ...]:
        """In whose sum (U3)."""
        return tuple(sorted(self.ended.closing.accepted)) if isinstance(self.ended, Committed) else ()


def device_fates(n: int, seed: int, *, dropping: float) -> list[DeviceFate]:
    """Fates of n clients. The share `dropping` falls silent, spread evenly over the five phases."""
    rng = np.random.default_rng(derive_seed(seed, "secure rounds"))
    gone = rng.permutation(n)[: round(dropping * n)]
    silent_from = {int(index): PHASES[i % len(PHASES)] for i, index in enumerate(gone)}
    work_s, latency_s = _WORK_S * rng.lognormal(0, 0.4, n), _LATENCY_S * rng.lognormal(0, 0.8, n)
    facts = zip(work_s, latency_s, _BYTES_PER_S * rng.lognormal(0, 0.8, n), strict=True)
    return [DeviceFate(float(a), float(b), float(c), float(c), silent_from.get(i)) for i, (a, b, c) in enumerate(facts)]


def play(plan: RoundPlan, composition: Composition, luck: Sequence[DeviceFate], seed: int = 0) -> PlayedRound:
    """One attempt, from the invitation to the sum or until it is given up. `luck`: of each client, by rank."""
    stage = VirtualTime()
    by_name = {client_name(rank): one for rank, one in enumerate(luck)}
    candidates = tuple(Candidate(name, 1) for name in by_name)
    opening = Gathered(stage.now, candidates, seeded_bytes(f"{seed}/coordinator")(RANDOM_BYTES))
    opened, _ = advance(Recruiting(plan, since=stage.now), opening)
    assert isinstance(opened, Training), "all are asked"

    inputs = {name: made_contribution(composition, index) for index, name in enumerate(sorted(by_name))}
    masking = RealMasking(composition, inputs)
    done = exchange(stage, opened, composition.layout, ExchangeParties(by_name, masking, str(seed)))
    ended: RoundState = done.state
    if isinstance(ended, Closing):
        ended, _ = advance(ended, Applied(stage.now, _SHA256))
    assert isinstance(ended, Committed | Abandoned)
    levels, words = (masking.unmasked(done.party) if isinstance(ended, Committed) else None) or (None, None)
    refusals = {name: device.refusal for name, device in done.devices.items() if device.refusal}
    return PlayedRound(
        ended,
        None if levels is None else lift(levels, composition.secure.bits),
        words,
        stage.now,
        stage.up,
        stage.down,
        refusals,
    )
