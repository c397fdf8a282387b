"""The published model of a run that sends changes: it follows the master copy in steps.

The published model moves towards the master copy by whole multiples of a step D. So a client that has it needs only the
integers k to make the next one:

    x = published(master') - published       the distance to move, in half precision as far as that can hold it
    k = sign(x) * floor(|x| / D + 1/2)       to the nearest, cut to 32,766
    published' = published + D * k           in float32, or float64 where the tensor is; then in its own dtype

The difference master' - published' is part of the next round's x. This is error feedback (Seide, Fu, Droppo, Li, Yu,
2014) without a state of its own, and every client has the same model, whichever way it downloaded it. Exact tensors
(`TensorSpec.is_coded`) take the master's values.

Every machine must compute the same bits, because the hash of the result is the model's identity. D is a multiple of the
root mean square of x. That is made of counts: how many |x| begin, as float32, with the same 16 bits. Counts add up in
any order; dropping the other bits makes D 0.3 % shorter. Products and sums are separate operations, so that no
processor fuses them.
"""

import math
from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from umbel.aggregation.codec.entropy import entropy
from umbel.aggregation.codec.entropy.classes import EnergyMeter
from umbel.aggregation.model.layout import Layout, TensorSpec
from umbel.aggregation.model.next_model import HasMean, ServerStep, next_pieces
from umbel.aggregation.model.state import (
    Piece,
    Values,
    master_dtype,
    pieces,
    published,
    segments,
    torch_dtype,
    weight_change,
)
from umbel.aggregation.plans.codec import as_float32
from umbel.aggregation.types import LEVEL_MAX

STEP_MIN, STEP_MAX = 2.0**-100, 2.0**100  # far within float32; the smaller one is also the step if nothing changes
_ROUNDING = 0.5  # a dead zone about zero would be no better than a longer step, because the error is fed back
_FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127
_KEPT_BITS = 16
_SAMPLED_SEGMENTS = 4


def to_move(spec: TensorSpec, master: Tensor, before: Tensor) -> Tensor:
    """x: how far values of a float tensor must move, as float32. `master` and `before` have their copies' dtypes."""
    return weight_change(spec, published(spec, master), before).clamp_(-_FLOAT32_MAX, _FLOAT32_MAX)


def levels_of(x: Tensor, step: float) -> Tensor:
    """k: float32 -> int32. `step` must be a float32."""
    steps = x.abs().mul_(as_float32(1.0 / step)).add_(_ROUNDING).floor_().clamp_(max=float(LEVEL_MAX))
    return steps.copysign_(x).to(torch.int32)


def moved(spec: TensorSpec, before: Tensor, levels: Tensor, step: float) -> Tensor:
    """The next published values of a float tensor: in its dtype, and finite."""
    wide = torch.float64 if spec.dtype == "float64" else torch.float32
    after = levels.to(wide).mul_(step).add_(before.to(wide))
    limits = torch.finfo(torch_dtype(spec))
    return after.clamp_(limits.min, limits.max).to(torch_dtype(spec))


class Spread:
    """Counts how far the values of a model must move, piece by piece, in any order."""

    def __init__(self) -> None:
        self._counts = torch.zeros(1 << (_KEPT_BITS - 1), dtype=torch.int64)

    def add(self, spec: TensorSpec, master: Tensor, before: Tensor) -> None:
        """Count values of a tensor. Exact tensors are left out, because they do not move in steps."""
        if spec.is_coded:
            kinds = to_move(spec, master, before).abs_().view(torch.int32) >> (32 - _KEPT_BITS)
            self._counts += torch.bincount(kinds, minlength=self._counts.numel())

    def step(self, in_rms: float) -> float:
        """D, a float32: `in_rms` times the root mean square of all that was counted, within the bounds."""
        kinds = self._counts.nonzero().squeeze(1)
        starts = (kinds << (32 - _KEPT_BITS)).to(torch.int32).view(torch.float32).tolist()
        counts = self._counts[kinds].tolist()
        energy = math.fsum(count * start * start for count, start in zip(counts, starts, strict=True))
        rms = math.sqrt(energy / max(sum(counts), 1))
        return as_float32(min(max(in_rms * rms, STEP_MIN), STEP_MAX))


def write_next_master(
    layout: Layout, start: Values, mean: HasMean, step: ServerStep, master: Values, public: Values, in_rms: float
) -> float:
    """Write the next master copy to `master`; return D, the step with which the published model `public` follows.

    `start`: the master copy before. `in_rms`: the step in root mean squares. Raises `ModelOverflow`.
    """
    spread = Spread()
    for piece, values in next_pieces(layout, start, mean, step, master):
        piece.put(master, values)
        if piece.spec.is_sent:  # the others never move, so their zeros would only shorten the step
            spread.add(piece.spec, values, piece.of(public, torch_dtype(piece.spec)))
    return spread.step(in_rms)


class Publication:
    """Moves a published model to the next version. Run `exact` and `segments` to their ends, once each."""

    def __init__(self, layout: Layout, step: float, master: Values, public: Values) -> None:
        """`master`: the next master copy. `public`: the published model before; its values are overwritten."""
        self._layout = layout
        self._step = step
        self._master = master
        self._public = public

    def exact(self) -> Iterator[Tensor]:
        """Set the values of exact tensors. Yields the bits that change in them, as uint8."""
        for piece in pieces(self._layout):
            spec = piece.spec
            if not spec.is_coded:
                before = piece.of(self._public, torch_dtype(spec))
                after = published(spec, piece.of(self._master, master_dtype(spec)))
                piece.put(self._public, after)
                yield before.view(torch.uint8) ^ after.view(torch.uint8)

    def segments(self) -> Iterator[Tensor]:
        """Move the values of float tensors. Yields int32 levels by segment of the vector; exact values have zeros."""
        for segment in segments(self._layout, entropy.SEGMENT):
            yield torch.cat([self._moved(piece) for piece in segment])

    def sample(self) -> list[tuple[int, Tensor]]:
        """Some of `segments`, from all over the model, each with the index of its first value. Nothing moves."""
        every = max(1, -(-self._layout.n_values // entropy.SEGMENT) // _SAMPLED_SEGMENTS)
        chosen = [(i, one) for i, one in enumerate(segments(self._layout, entropy.SEGMENT)) if i % every == 0]
        return [(i * entropy.SEGMENT, torch.cat([self._levels(one)[1] for one in segment])) for i, segment in chosen]

    def measure(self, meter: EnergyMeter) -> None:
        """Add to `meter` how far each value must move. Nothing moves."""
        for piece in pieces(self._layout):
            if piece.spec.is_coded:
                meter.add(piece.spec.offset + piece.first, self._x(piece)[1])

    def move(self) -> None:
        """Move the whole model, for a caller that needs no levels."""
        for _ in chain(self.exact(), self.segments()):
            pass

    def _moved(self, piece: Piece) -> Tensor:
        before, levels = self._levels(piece)
        if piece.spec.is_coded:
            piece.put(self._public, moved(piece.spec, before, levels, self._step))
        return levels

    def _levels(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """The published values before, and their levels; no values and zeros for an exact tensor."""
        if not piece.spec.is_coded:
            return torch.empty(0), torch.zeros(piece.n_values, dtype=torch.int32)
        before, x = self._x(piece)
        return before, levels_of(x, self._step)

    def _x(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """The published values before of a piece of a float tensor, and how far they must move."""
        before = piece.of(self._public, torch_dtype(piece.spec))
        return before, to_move(piece.spec, piece.of(self._master, master_dtype(piece.spec)), before)
