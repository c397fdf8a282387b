"""The contribution of a client of a private round, before masks: levels within the bound, and a share of the noise.

Of the coordinator's claims it uses only the plan that the client has accepted. The sum of squares is exact, and is that
of the very integers that noise is added to. The time does not depend on the update: the coordinator chooses the bound,
and a clock would show on which side of it an update lies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from umbel.aggregation.codec.rotated import Dither, Rotated, sum_of_squares
from umbel.aggregation.plans.noise import NoisePlan
from umbel.aggregation.privacy.sensitivity import clip_within
from umbel.aggregation.privacy.skellam import Skellam
from umbel.aggregation.torch_later import torch
from umbel.aggregation.types import NORM_MAX, NORM_MIN

if TYPE_CHECKING:
    from torch import Tensor


def contribution(rotated: Rotated, values: Tensor, dither: Dither, plan: NoisePlan, key: bytes) -> Iterator[Tensor]:
    """The client's vector as in `Modular.residues`, with noise: consecutive parts, int32.

    `values`: float32, `rotated.n_values`; they are not changed. `key`: 32 bytes, fresh from the operating system, for
    this vector only. Takes two passes over the vector, and the memory of a part. Raises `ValueError` as
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
    """`Rotated.levels_with` of an update that is shortened until its sum of squares is at most `bound_squared`.

    The update is clipped to the norm that the bound allows (`sensitivity.py`), whatever the plan's clip norm is. If
    rounding still exceeds the bound, as once in 2^20 updates, all levels are zero. There are always two passes.
    """
    fitted = _fitted(bound_squared, rotated)
    found = sum(sum_of_squares(part) for part in fitted.levels_with(values, dither))
    return fitted.levels_with(values if found <= bound_squared else torch.zeros_like(values), dither)


def _fitted(bound_squared: int, rotated: Rotated) -> Rotated:
    """`rotated` with a clip norm that the bound allows. In every plan that umbel makes, this is the plan's own."""
    rate, clip = rotated.plan.inverse_step, rotated.plan.clip_norm
    most = math.inf if clip is None else clip * rate
    fits = clip_within(bound_squared, rotated.n_levels, most)
    if fits == most:
        return rotated
    return replace(rotated, plan=replace(rotated.plan, clip_norm=min(max(fits / rate, NORM_MIN), NORM_MAX)))
