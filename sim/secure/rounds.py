"""Secure rounds for benchmarks and tests: a plan, the clients' contributions, and the plain sums to compare with."""

from collections.abc import Iterable

import torch
from torch import Tensor

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import Codec, CodecPlan, as_float32
from umbel.aggregation.plans.masks import SecurePlan
from umbel.aggregation.plans.round import RoundPlan, Weighting
from umbel.aggregation.secagg.numbers.composition import Composition
from umbel.aggregation.secagg.numbers.contribution import (
    CONTRIBUTION_SECRET_BYTES,
    Contribution,
    LocalWork,
    contribution,
)
from umbel.aggregation.types import ClientId, RunId
from umbel.sim.secure.exchange import seeded_bytes

SAMPLES_MAX = 1000
WINDOW_S = 600.0
_BITS_OF_A_LEVEL, _RMS = 16, 0.01


def secure_plan(n: int, *, bits: int, minimum: int = 3, window_s: float = WINDOW_S) -> RoundPlan:
    """A round that asks n clients and waits for all of them until its window ends."""
    secure = SecurePlan(bits, SAMPLES_MAX, n, minimum)
    return RoundPlan(
        RunId("secure"), 1, 1, n, minimum, 1.0, window_s, Weighting.SAMPLES, SAMPLES_MAX, 64.0, seed=1, secure=secure
    )


def bits_of_sums(n: int) -> int:
    """How many bits hold the sum of any n levels of 16 bits."""
    return _BITS_OF_A_LEVEL + (n - 1).bit_length()


def composition_of(plan: RoundPlan, n_values: int) -> Composition:
    """The composition for a model of one tensor."""
    assert plan.secure is not None
    codec = CodecPlan(Codec.INTEGER, as_float32(64 / _RMS), key=7)
    layout = Layout.of_state({"weights": torch.zeros(n_values)})
    return Composition(codec, plan.secure, plan.grid, SAMPLES_MAX, layout)


def made_contribution(composition: Composition, rank: int) -> Contribution:
    """A random weight change of a client; its sample count follows from its rank."""
    draw = torch.Generator().manual_seed(rank)
    change = torch.randn(composition.layout.n_values, generator=draw) * _RMS
    secret = seeded_bytes(f"{rank}/contribution")(CONTRIBUTION_SECRET_BYTES)
    return contribution(composition, lambda: iter([change]), LocalWork(1 + rank % SAMPLES_MAX, 1, 1), secret)


def plain_sums(composition: Composition, ranks: Iterable[int]) -> tuple[Tensor, Tensor]:
    """The sums of levels and words of these clients' contributions before masking."""
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
