"""Codecs 2 to 7, 9 and 11: a codec of vectors encodes an update; the decoded values are rounded to a grid.

Decoded values are rounded to the grid (`grid.py`), as float32 updates are, so the sum is exact and the same in any
order. Values of exact tensors travel beside them, as in the integer codec; the vector has zeros in their places. The
payload is the exact values as float32, in layout order, then the codec's bytes (`registry.py`).

An update states its length only. Parameters, keys and sizes come from the plan.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from umbel.aggregation.codec.entropy.payload import Buffer, Payload, exactly
from umbel.aggregation.codec.feedback import Residual, SentPayload, send
from umbel.aggregation.codec.vectors.codec import CodecContext, Projections, Sketching
from umbel.aggregation.codec.vectors.lowrank import LowRank
from umbel.aggregation.codec.vectors.registry import vector_codec
from umbel.aggregation.codec.vectors.sparse import RandomMask
from umbel.aggregation.errors import LyingLength
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.next_model import HasMean
from umbel.aggregation.model.state import ControlPlaces, CountPlaces, ExactPlaces, with_device
from umbel.aggregation.plans.codec import Codec, CodecPlan, Grid
from umbel.aggregation.stated_order import norm
from umbel.aggregation.update.grid import GridAccumulator, IntegerSum, check_values, to_integers
from umbel.aggregation.update.wire import HEADER_BYTES, header_for, read_header


class GradientProjections(Mapping[str, Callable[[Tensor], Tensor]]):
    """By tensor, the projection of a gradient onto the part that a plan's updates can carry.

    It is the same for the whole cohort, and empty if updates can carry all of a gradient, at once or with error
    feedback.
    """

    def __init__(self, plan: CodecPlan, layout: Layout) -> None:
        """`layout`: of the model."""
        self.plan, self.layout = plan, layout
        self._by_tensor = _projections(plan, layout)

    def __getitem__(self, name: str) -> Callable[[Tensor], Tensor]:
        return self._by_tensor[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_tensor)

    def __len__(self) -> int:
        return len(self._by_tensor)


def _projections(plan: CodecPlan, layout: Layout) -> Projections:
    if plan.feedback or plan.codec in (Codec.FLOAT32, Codec.INTEGER):
        return {}
    codec = vector_codec(plan.codec, plan.parameters)
    if isinstance(codec, RandomMask | LowRank) and codec.mode is Sketching.STRUCTURED:
        return codec.projections(CodecContext(layout.update, plan.key))
    return {}


class GridCodec:
    """The part of an `UpdateCodec` that is the same for all codecs whose integers are those of the grid."""

    def __init__(self, grid: Grid, layout: Layout, payload_bytes: range) -> None:
        self._grid = grid
        self._layout = layout
        self._payload_bytes = payload_bytes

    @property
    def header_bytes(self) -> int:
        return HEADER_BYTES

    @property
    def update_bytes(self) -> range:
        return range(HEADER_BYTES + self._payload_bytes.start, HEADER_BYTES + self._payload_bytes.stop)

    def within(self) -> Projections:
        return {}

    def new_sum(self) -> IntegerSum:
        return GridAccumulator(self._layout.n_values, self._grid, CountPlaces(self._layout))

    def mean(self, total: IntegerSum, parts: Iterable[object]) -> HasMean:
        assert isinstance(total, GridAccumulator), "not a sum of this codec"
        return total

    def update_rms(self, total: IntegerSum) -> float | None:
        return None


class VectorUpdateCodec(GridCodec):
    """An `UpdateCodec` that uses a codec of vectors. A client needs memory for some vectors of the model."""

    def __init__(self, plan: CodecPlan, grid: Grid, layout: Layout) -> None:
        self._plan = plan
        self._codec = vector_codec(plan.codec, plan.parameters)
        self._exact, self._control = ExactPlaces(layout), ControlPlaces(layout)
        exact_bytes, lengths = 4 * self._exact.n_values, self._codec.payload_bytes(layout)
        super().__init__(grid, layout, range(exact_bytes + lengths.start, exact_bytes + lengths.stop))

    # --- a client's side ----------------------------------------------------------------------------------------------

    def encode(self, change: Callable[[], Iterator[Tensor]], rank: int) -> Iterator[Buffer]:
        exact, values = self._split(change())
        yield from self._framed(exact, tuple(self._codec.encode(self._clipped(values), self._context(rank))), rank)

    def within(self) -> Projections:
        return GradientProjections(self._plan, self._layout)

    def encode_fed(
        self, change: Callable[[], Iterator[Tensor]], rank: int, version: int, before: Residual | None
    ) -> SentPayload:
        """`encode` with error feedback. `version`: of the model that was trained. `before`: the last residual.

        Raises as `encode` does.
        """
        exact, values = self._split(change())
        context = self._context(rank)
        sent = send(self._codec, self._clipped(values), context, version, before, self._plan.momentum)
        self._exact.clear(sent.left.values, 0)  # a codec may decode zeros as other values
        self._control.clear(sent.left.values)  # the client keeps what was not sent of it (`algorithms/scaffold.py`)
        return SentPayload(self._framed(exact, sent.pieces, rank), sent.left)

    def _split(self, change: Iterator[Tensor]) -> tuple[bytes, Tensor]:
        """The exact values as bytes, and the whole change without them, on the device of its first piece."""
        device, pieces = with_device(change)
        values, exact, first = torch.empty(self._layout.n_values, device=device), bytearray(), 0
        for piece in pieces:
            check_values(piece, self._grid, first)
            exact += self._exact.taken_out(values[first : first + piece.numel()].copy_(piece), first)
            first += piece.numel()
        return bytes(exact), values

    def _clipped(self, values: Tensor) -> Tensor:
        """`values`, which are written over."""
        if self._plan.clip_norm is None:
            return values
        return values.mul_(self._plan.scale(norm(values)))

    def _framed(self, exact: bytes, payload: tuple[bytes, ...], rank: int) -> tuple[bytes, ...]:
        """The whole update. Raises `UpdateOutOfRange` for one that the coordinator would refuse.

        Codecs that are right on average can overshoot.
        """
        header = header_for(self._layout, self._plan.codec, len(exact) + sum(map(len, payload))).encode()
        for _ in self._values(header, (exact, *payload), rank):
            pass
        return header, exact, *payload

    # --- the coordinator's side ---------------------------------------------------------------------------------------

    def integers(self, header: bytes, pieces: Iterable[Buffer], rank: int) -> Iterator[Tensor]:
        return (to_integers(values, self._grid) for values in self._values(header, pieces, rank))

    def largest_change(self, header: bytes, pieces: Iterable[Buffer], rank: int) -> float:
        return max((float(part.abs().amax()) for part in self._values(header, pieces, rank) if part.numel()), default=0)

    def _values(self, header: bytes, pieces: Iterable[Buffer], rank: int) -> Iterator[Tensor]:
        """The change as it will be summed: float32, within the grid's bounds."""
        said = read_header(header, self._layout, self._plan.codec, self._payload_bytes)
        payload = Payload(exactly(pieces, said.payload_bytes))
        exact = payload.take(4 * self._exact.n_values).view(torch.float32)
        check_values(exact, self._grid)
        first = 0
        for values in self._codec.decode(payload.rest(), self._context(rank)):
            check_values(values, self._grid, first)
            yield self._exact.put_back(values, first, exact)
            first += values.numel()
        if first != self._layout.n_values:
            raise LyingLength(f"the update has {first} values, but the model's layout has {self._layout.n_values}")

    def _context(self, rank: int) -> CodecContext:
        return CodecContext(self._layout, self._plan.key, rank)
