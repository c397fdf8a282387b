"""What clients are given of a master copy where they are sent changes: a model that follows it in steps.

The published model moves towards the master copy by whole multiples of a step D, so that whoever has it needs only the
integers k to have the next one:

    x = published(master') - published       what there is to move; in half precision, to what that can hold
    k = sign(x) * floor(|x| / D + 1/2)       to the nearest, cut to 32,766
    published' = published + D * k           in float32, or float64 where the tensor is; then in its own dtype

What is not sent stands in master' - published', and is in the next round's x: error feedback (Seide, Fu, Droppo, Li,
Yu, 2014) without a state of its own, and the same model for everyone, whichever way it came. Values of exact
tensors (`TensorSpec.is_coded`) are the master's.

All of it must come out the same on every machine, for the hash of the result is the model's identity. D is a multiple
of the root mean square of x, which is made of counts: how many |x| begin, as float32, with the same 16 bits. Counts add
up in any order; cutting off the other bits makes D 0.3 % shorter. Products and sums are operations of their own, so
that no processor fuses them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from umbel.aggregation.codec.entropy import entropy
from umbel.aggregation.codec.entropy.classes import EnergyMeter
from umbel.aggregation.model.layout import Layout, TensorSpec, published, weight_change
from umbel.aggregation.model.pieces import Piece, Values, pieces, segments
from umbel.aggregation.plans.codec import as_float32
from umbel.aggregation.torch_later import torch
from umbel.aggregation.types import LEVEL_MAX

if TYPE_CHECKING:
    from torch import Tensor

STEP_MIN, STEP_MAX = 2.0**-100, 2.0**100  # far from where float32 ends; the lesser one also if nothing changes
_ROUNDING = 0.5  # less of it, a dead zone about zero, is no better than a longer step: the error is fed back
_FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127
_KEPT_BITS = 16
_SAMPLED_SEGMENTS = 4


def to_move(spec: TensorSpec, master: Tensor, before: Tensor) -> Tensor:
    """x: how far values of a float tensor have to move: float32. `master`, `before`: in the dtypes of their copies."""
    return weight_change(spec, published(spec, master), before).clamp_(-_FLOAT32_MAX, _FLOAT32_MAX)


def levels_of(x: Tensor, step: float) -> Tensor:
    """k: int32 of float32. `step`: a float32."""
    steps = x.abs().mul_(as_float32(1.0 / step)).add_(_ROUNDING).floor_().clamp_(max=float(LEVEL_MAX))
    return steps.copysign_(x).to(torch.int32)


def moved(spec: TensorSpec, before: Tensor, levels: Tensor, step: float) -> Tensor:
    """The next published values of a float tensor: of its dtype, and finite."""
    wide = torch.float64 if spec.dtype == "float64" else torch.float32
    after = levels.to(wide).mul_(step).add_(before.to(wide))
    limits = torch.finfo(spec.torch_dtype)
    return after.clamp_(limits.min, limits.max).to(spec.torch_dtype)


class Spread:
    """How far the values of a model have to move, counted piece by piece, in any order."""

    def __init__(self) -> None:
        self._counts = torch.zeros(1 << (_KEPT_BITS - 1), dtype=torch.int64)

    def add(self, spec: TensorSpec, master: Tensor, before: Tensor) -> None:
        """Count values of a tensor; those that no step is for are left out."""
        if spec.is_coded:
            kinds = to_move(spec, master, before).abs_().view(torch.int32) >> (32 - _KEPT_BITS)
            self._counts += torch.bincount(kinds, minlength=self._counts.numel())

    def step(self, in_rms: float) -> float:
        """D, a float32: `in_rms` times the root mean square of what was counted, as far as the bounds allow."""
        kinds = self._counts.nonzero().squeeze(1)
        starts = (kinds << (32 - _KEPT_BITS)).to(torch.int32).view(torch.float32).tolist()
        counts = self._counts[kinds].tolist()
        energy = math.fsum(count * start * start for count, start in zip(counts, starts, strict=True))
        rms = math.sqrt(energy / max(sum(counts), 1))
        return as_float32(min(max(in_rms * rms, STEP_MIN), STEP_MAX))


class Publication:
    """A published model on its way to the next version. `exact` and `segments` must both be run to their ends, once.

    `master`: the next version's; `public`: the published model before it, whose values are written over.
    """

    def __init__(self, layout: Layout, step: float, master: Values, public: Values) -> None:
        self._layout = layout
        self._step = step
        self._master = master
        self._public = public

    def exact(self) -> Iterator[Tensor]:
        """Set the values of exact tensors; the bits that change in them, as uint8."""
        for piece in pieces(self._layout):
            spec = piece.spec
            if not spec.is_coded:
                before = piece.of(self._public, spec.torch_dtype)
                after = published(spec, piece.of(self._master, spec.master_dtype))
                self._public.write(spec.name, piece.first, after)
                yield before.view(torch.uint8) ^ after.view(torch.uint8)

    def segments(self) -> Iterator[Tensor]:
        """Move the values of float tensors; the levels by segments of the vector, with zeros for all others: int32."""
        for segment in segments(self._layout, entropy.SEGMENT):
            yield torch.cat([self._moved(piece) for piece in segment])

    def sample(self) -> list[tuple[int, Tensor]]:
        """Some of `segments` from all over the model, of which nothing is moved, each with its first value's place."""
        every = max(1, -(-self._layout.n_values // entropy.SEGMENT) // _SAMPLED_SEGMENTS)
        chosen = [(i, one) for i, one in enumerate(segments(self._layout, entropy.SEGMENT)) if i % every == 0]
        return [(i * entropy.SEGMENT, torch.cat([self._levels(one)[1] for one in segment])) for i, segment in chosen]

    def measure(self, meter: EnergyMeter) -> None:
        """Tell `meter` how far each value has to move; nothing is moved."""
        for piece in pieces(self._layout):
            if piece.spec.is_coded:
                meter.add(piece.spec.offset + piece.first, self._x(piece)[1])

    def _moved(self, piece: Piece) -> Tensor:
        before, levels = self._levels(piece)
        if piece.spec.is_coded:
            self._public.write(piece.spec.name, piece.first, moved(piece.spec, before, levels, self._step))
        return levels

    def _levels(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """The published values before (of a float tensor), and their levels."""
        if not piece.spec.is_coded:
            return torch.empty(0), torch.zeros(piece.n_values, dtype=torch.int32)
        before, x = self._x(piece)
        return before, levels_of(x, self._step)

    def _x(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """Of a piece of a float tensor, the published values before, and how far they have to move."""
        before = piece.of(self._public, piece.spec.torch_dtype)
        return before, to_move(piece.spec, piece.of(self._master, piece.spec.master_dtype), before)
