"""A random mask: one coordinate in every N, the same for the whole cohort, drawn from each round's key.

Konecny, McMahan, Yu, Richtarik, Suresh and Bacon: Federated learning: strategies for improving communication
efficiency (2016): a structured update (the client trains the chosen coordinates alone; `trained` says which), or the
subsampling of a sketched one (it trains all, and what is sent counts `every` times).

The mask has one coordinate in each run of `every` neighbours, at a place drawn by Philox. So each coordinate is chosen
with probability 1 / `every`, and their number is known beforehand, up to one. (In an incomplete last run the place may
lie past the end; then none is chosen there.)

Sketched it is **unbiased**. Structured it returns the part of a change within the mask, exactly. **Linear** with
float32, up to its rounding: the mask is shared, so payloads can be added as vectors. With bfloat16 each client rounds
for itself. Stateless.
**Cost**: 32 or 16 bits a chosen coordinate. Error, sketched: (`every` - 1) ||x||^2, which is large: it pays where the
client trains within the mask, or with error feedback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from umbel.aggregation.codec.entropy.payload import Buffer, Payload, Precision, bytes_of, require_finite
from umbel.aggregation.codec.vectors.codec import CodecContext, Projections, Sketching, require_encodable
from umbel.aggregation.codec.vectors.sparse import one_in_every, scattered
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor

EVERY_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class RandomMask:
    """A mask of one coordinate in every `every`."""

    every: int = 10
    mode: Sketching = Sketching.SKETCHED
    precision: Precision = Precision.FLOAT32

    def __post_init__(self) -> None:
        if not 1 <= self.every <= EVERY_MAX:
            raise ValueError(f"a mask has one coordinate in every 1 to {EVERY_MAX}, not {self.every}")

    @property
    def is_unbiased(self) -> bool:
        return self.mode is Sketching.SKETCHED and self.precision is Precision.FLOAT32

    @property
    def is_contraction(self) -> bool:
        return self.mode is Sketching.STRUCTURED

    @property
    def is_linear(self) -> bool:
        return self.precision is Precision.FLOAT32

    def payload_bytes(self, layout: Layout) -> range:
        """One length, or two if the last run is incomplete."""
        n_whole, n_left = divmod(layout.n_values, self.every)
        return range(n_whole * self.precision.n_bytes, (n_whole + bool(n_left)) * self.precision.n_bytes + 1)

    def chosen(self, context: CodecContext, device: torch.device | str = "cpu") -> Tensor:
        """The coordinates of this round's mask, in increasing order: int64."""
        return one_in_every(context.shared_key("mask"), self.every, context.n_values, device)

    def trained(self, context: CodecContext) -> dict[str, Tensor]:
        """For each owner, the values that a client trains in a structured round: bool, of the tensor's shape."""
        is_chosen = torch.zeros(context.n_values, dtype=torch.bool)
        is_chosen[self.chosen(context)] = True
        return {spec.name: is_chosen[spec.place].view(spec.shape) for spec in context.layout.owners()}

    def projections(self, context: CodecContext) -> Projections:
        """By tensor, the projection of a gradient onto the coordinates that a structured round trains."""
        return {name: _times(mask) for name, mask in self.trained(context).items()}

    def encode(self, values: Tensor, context: CodecContext) -> Iterator[bytes]:
        require_encodable(values, context)
        yield from bytes_of(self.precision.written(values[self.chosen(context, values.device)]))

    def decode(self, pieces: Iterable[Buffer], context: CodecContext) -> Iterator[Tensor]:
        payload, places = Payload(pieces), self.chosen(context)
        values = self.precision.read(payload.take(places.numel() * self.precision.n_bytes))
        payload.end()
        if self.mode is Sketching.SKETCHED:
            values = require_finite(values * self.every)
        yield from scattered(places, values, context.n_values)


def _times(mask: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda gradient: gradient * mask.to(gradient.device)
