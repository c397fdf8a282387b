"""What a client of a private round sends, before masks: its levels, within the bound, and its share of the noise.

Nothing here depends on what the coordinator claims but the plan that the client has agreed to: the sum of squares is
that of the very integers that noise is added to, and it is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from umbel.aggregation.codec.plan import NORM_MIN
from umbel.aggregation.codec.rotated import Dither, Rotated, sum_of_squares
from umbel.aggregation.privacy.noise_plan import NoisePlan
from umbel.aggregation.privacy.skellam import Skellam
from umbel.aggregation.stated_order import norm
from umbel.aggregation.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor

_TRIES = 16
_MARGIN = 0.99  # of what is shortened: the bound on a shorter one is not quite proportional


def contribution(rotated: Rotated, values: Tensor, dither: Dither, plan: NoisePlan, key: bytes) -> Iterator[Tensor]:
    """The client's vector in consecutive parts, int32, as `Modular.residues` gives it, but with noise.

    `values`: float32, `rotated.n_values`; they are left as they are. `key`: 32 bytes, fresh from the operating system,
    for this vector and no other. It takes two passes over the vector, and the memory of a part. Raises `ValueError` as
    `Rotated.levels_with` does, and for a plan of another length.
    """
    if plan.n_values != rotated.n_levels:
        raise ValueError(f"the noise is planned for {plan.n_values} levels; an update has {rotated.n_levels}")
    noise, first = Skellam(plan.variance_per_client), 0
    for part in levels_within(plan.bound_squared, rotated, values, dither):
        noise.add_to(part, key, first)
        first += part.numel()
        yield part


def levels_within(bound_squared: int, rotated: Rotated, values: Tensor, dither: Dither) -> Iterator[Tensor]:
    """`Rotated.levels_with`, of as much of the update as has a sum of squares of `bound_squared` at most.

    Where rounding takes it beyond the bound, which it does once in 2^20 updates, if the bound is that of
    `sensitivity.py`, the update is shortened until it is within; to nothing in the end, which is always possible.
    """
    for _ in range(_TRIES):
        found = sum(sum_of_squares(part) for part in rotated.levels_with(values, dither))
        if found <= bound_squared:
            return rotated.levels_with(values, dither)
        clip = _norm(rotated, values) * min(math.sqrt(bound_squared / found), 1.0) * _MARGIN
        if clip < NORM_MIN:
            break
        rotated = replace(rotated, plan=replace(rotated.plan, clip_norm=clip))
    return rotated.levels_with(torch.zeros_like(values), dither)


def _norm(rotated: Rotated, values: Tensor) -> float:
    """The L2 norm of what is rounded, in units of the weights."""
    found = norm(values)
    return found * rotated.plan.scale(found)
