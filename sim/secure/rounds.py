"""Secure rounds in virtual time, one at a time: the machine that the coordinator drives, real clients, keys and masks.

Only the clock is made up (`stage.py`), and who falls silent when (`devices.py`). Experiments have theirs of a
fleet (`experiments/secure_window.py`). All clients live in one process, so a roster's signatures are checked once, not
by each of them; everything else every client does itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from umbel.aggregation.codec.modular import lift
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import Codec, CodecPlan, as_float32
from umbel.aggregation.plans.masks import SecurePlan
from umbel.aggregation.plans.round import RoundPlan, Weighting
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
from umbel.aggregation.secagg.client import SecureClient
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.numbers.contribution import (
    CONTRIBUTION_SECRET_BYTES,
    Contribution,
    LocalWork,
    contribution,
)
from umbel.aggregation.secagg.turns import RANDOM_BYTES, Exchange
from umbel.aggregation.types import ClientId, RunId
from umbel.sim.secure.coordinator import MaskedSum
from umbel.sim.secure.devices import Luck
from umbel.sim.secure.exchange import Cast, exchange, seeded_bytes
from umbel.sim.secure.stage import Stage
from umbel.sim.secure.voices import MaskingVoice

SAMPLES_MAX = 1000
WINDOW_S = 600.0
_BITS_OF_A_LEVEL, _RMS = 16, 0.01
_SHA256 = "ab" * 32


@dataclass(frozen=True, slots=True)
class Played:
    """How a round went. `levels` (int32, of `bits`) and `words` (int64): the sums read; None if it was abandoned.

    `took_s`: virtual. `cpu_s`: of this process, by who had it and for what. `up`, `down`: bytes of message bodies, by
    client. `refusals`: why clients have left the round, in their words.
    """

    ended: Committed | Abandoned
    levels: Tensor | None = field(repr=False)
    words: Tensor | None = field(repr=False)
    took_s: float
    cpu_s: Mapping[str, float]
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


def secure_plan(n: int, *, bits: int, minimum: int = 3, window_s: float = WINDOW_S) -> RoundPlan:
    """A round that asks n clients, and waits for all of them until its window is over."""
    secure = SecurePlan(bits, SAMPLES_MAX, n, minimum)
    return RoundPlan(
        RunId("secure"), 1, 1, n, minimum, 1.0, window_s, Weighting.SAMPLES, SAMPLES_MAX, 64.0, seed=1, secure=secure
    )


def bits_of_sums(n: int) -> int:
    """That hold the sum of n levels of 16 bits, whatever they are."""
    return _BITS_OF_A_LEVEL + (n - 1).bit_length()


def composition_of(plan: RoundPlan, n_values: int) -> Composition:
    """For a model of one tensor."""
    assert plan.secure is not None
    codec = CodecPlan(Codec.INTEGER, as_float32(64 / _RMS), key=7)
    layout = Layout.of_state({"weights": torch.zeros(n_values)})
    return Composition(codec, plan.secure, plan.grid, SAMPLES_MAX, layout)


def made_contribution(composition: Composition, rank: int) -> Contribution:
    """A random change of the weights, by a client whose samples are known by its rank."""
    draw = torch.Generator().manual_seed(rank)
    change = torch.randn(composition.layout.n_values, generator=draw) * _RMS
    secret = seeded_bytes(f"{rank}/contribution")(CONTRIBUTION_SECRET_BYTES)
    return contribution(composition, lambda: iter([change]), LocalWork(1 + rank % SAMPLES_MAX, 1, 1), secret)


def plain_sums(composition: Composition, ranks: Iterable[int]) -> tuple[Tensor, Tensor]:
    """The levels' and the words' sums of what these clients have before they mask it: Python's integers would agree."""
    levels = torch.zeros(composition.n_levels, dtype=torch.int64)
    words = torch.zeros(composition.n_words, dtype=torch.int64)
    for rank in ranks:
        one = made_contribution(composition, rank)
        levels += torch.cat(list(one.levels())).to(torch.int64)
        words += one.words
    assert int(levels.abs().max()) < 1 << (composition.secure.bits - 1), "they fit, so nothing wraps"
    return levels.to(torch.int32), words


def client_name(rank: int) -> ClientId:
    """Names in the order of their ranks, up to 100,000 of them."""
    return ClientId(f"client-{rank:05}")


def play(plan: RoundPlan, composition: Composition, luck: Sequence[Luck], seed: int = 0) -> Played:
    """One attempt, from the invitation to the sum or until it is given up. `luck`: of each client, by rank."""
    stage, total = Stage(), MaskedSum(composition)
    by_name = {client_name(rank): one for rank, one in enumerate(luck)}
    candidates = tuple(Candidate(name, 1) for name in by_name)
    opening = Gathered(stage.now, candidates, seeded_bytes(f"{seed}/coordinator")(RANDOM_BYTES))
    opened, _ = advance(Recruiting(plan, since=stage.now), opening)
    assert isinstance(opened, Training), "all are asked"

    def voice(name: ClientId, client: SecureClient) -> MaskingVoice:
        return MaskingVoice(client, made_contribution(composition, client.index))

    done = exchange(stage, opened, composition.layout, Cast(by_name, voice, str(seed), total))
    ended: RoundState = done.state
    if isinstance(ended, Closing):
        ended, _ = advance(ended, Applied(stage.now, _SHA256))
    assert isinstance(ended, Committed | Abandoned)
    levels, words = total.unmasked(done.party) if isinstance(ended, Committed) else (None, None)
    refusals = {name: device.refusal for name, device in done.devices.items() if device.refusal}
    return Played(
        ended,
        None if levels is None else lift(levels, composition.secure.bits),
        words,
        stage.now,
        stage.cpu_s,
        stage.up,
        stage.down,
        refusals,
    )
