"""How the updates of one round are encoded, read and summed: a plan's codec for one model.

A codec turns an update into integers on the round's public grid. The round's result is their exact sum (`IntegerSum`).
One object serves both ends: a client encodes with it, and the coordinator or a replay reads with it.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from umbel.aggregation.codec.entropy.payload import Buffer
from umbel.aggregation.codec.integer import IntegerCodec
from umbel.aggregation.codec.vector_update import GridCodec, VectorUpdateCodec
from umbel.aggregation.codec.vectors.codec import Projections, one_length
from umbel.aggregation.errors import LyingLength
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.model.next_model import HasMean
from umbel.aggregation.plans.codec import Codec, CodecPlan, Grid, Part
from umbel.aggregation.update.grid import IntegerSum, check_values, to_integers
from umbel.aggregation.update.wire import float32_header, read_header

Change: TypeAlias = Callable[[], Iterator[Tensor]]


class UpdateReader(Protocol):
    """Reads and sums the updates of one round."""

    @property
    def header_bytes(self) -> int:
        """The length of the beginning, which `integers` must get in one piece."""
        ...

    @property
    def update_bytes(self) -> range:
        """The lengths that an update may have."""
        ...

    def integers(self, header: bytes, pieces: Iterable[Buffer], rank: int) -> Iterator[Tensor]:
        """The integers of an update that are added to the sum, in pieces. Each piece may overwrite the one before.

        `header`: its first `header_bytes`. `pieces`: the rest; each but the last is a multiple of 8 bytes long. Raises
        an `UpdateRefused` at the first fault. An update that was read to its end may be summed.
        """
        ...

    def largest_change(self, header: bytes, pieces: Iterable[Buffer], rank: int) -> float:
        """Check a whole update as `integers` does; return its largest change of one value, in units of the weights."""
        ...

    def new_sum(self) -> IntegerSum: ...


class UpdateCodec(UpdateReader, Protocol):
    """The codec of one round and model whose updates can be read one by one."""

    def encode(self, change: Change, rank: int) -> Iterator[Buffer]:
        """An update, in pieces. Each call of `change` gives the weight change from its beginning, as float32 pieces.

        The pieces may be on any device. The update is encoded on that of the first piece, with the bits of the CPU, and
        only what the update holds is copied to the CPU (docs/reference/codecs.md has the one exception).

        Raises `NonFiniteUpdate`, `UpdateOutOfRange`.
        """
        ...

    def within(self) -> Projections:
        """By tensor, the projection of a gradient onto the part that can be sent; empty if all of it can be sent."""
        ...

    def mean(self, total: IntegerSum, parts: Iterable[Part]) -> HasMean:
        """The weighted mean of the updates in a sum. `parts`: the clients in it."""
        ...

    def update_rms(self, total: IntegerSum) -> float | None:
        """The weighted mean of the updates' root mean squares, in units of the weights; None if it is not measured."""
        ...


def codec_for(plan: CodecPlan, grid: Grid, layout: Layout) -> UpdateCodec:
    """The codec that a round's plan asks for. `layout`: of the model; the codec's own is `layout.update`."""
    match plan.codec:
        case Codec.FLOAT32:
            return Float32Codec(grid, layout.update)
        case Codec.INTEGER:
            return IntegerCodec(plan, grid, layout.update)
        case _:
            return VectorUpdateCodec(plan, grid, layout.update)


def _is_writable(piece: Buffer) -> bool:
    return not memoryview(piece).readonly


class Float32Codec(GridCodec):
    """Codec 0: the weight change as little-endian float32, in layout order. The integers are those of the grid.

    Unbiased and stateless. Not linear, because sums of float32 depend on their order. Cost: 32 bits a coordinate.
    """

    def __init__(self, grid: Grid, layout: Layout) -> None:
        super().__init__(grid, layout, one_length(4 * layout.n_values))

    def encode(self, change: Change, rank: int) -> Iterator[Buffer]:
        yield float32_header(self._layout).encode()
        first = 0
        for values in change():
            check_values(values, self._grid, first)
            yield values.cpu().numpy().astype("<f4", copy=False).data.cast("B")
            first += values.numel()

    def integers(self, header: bytes, pieces: Iterable[Buffer], rank: int) -> Iterator[Tensor]:
        read_header(header, self._layout, Codec.FLOAT32, self._payload_bytes)
        first = 0
        for piece in pieces:
            if len(piece) % 4:
                raise LyingLength("the update ends in the middle of a value")
            values = torch.frombuffer(piece if _is_writable(piece) else bytearray(piece), dtype=torch.float32)
            check_values(values, self._grid, first)
            yield to_integers(values, self._grid)
            first += values.numel()
        if first != self._layout.n_values:
            raise LyingLength(f"the update has {first} values, but the model's layout has {self._layout.n_values}")

    def largest_change(self, header: bytes, pieces: Iterable[Buffer], rank: int) -> float:
        largest = max((int(part.abs().max()) for part in self.integers(header, pieces, rank)), default=0)
        return largest * self._grid.step
