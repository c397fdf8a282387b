"""All values, as float32 exactly or as bfloat16, in byte planes for a general compressor.

The bytes of a chunk's values are written plane by plane, the highest last: signs and exponents are similar among
neighbours, and compress well when they are apart from the noise below. One Zstandard frame of level 1 holds all.

**Unbiased** with float32, which is exact (the sign of zero too). With bfloat16 each value is rounded to nearest, ties
to even, by 2^-8 of its size at most (values beyond bfloat16's largest become that). **Not linear**. Stateless.
**Cost**: about 27 bits a coordinate of Gaussian values with float32 and 11 with bfloat16; less where many are zero.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from umbel.aggregation.codec.entropy.frame import compress, decompress, framed_bytes_max
from umbel.aggregation.codec.entropy.payload import Buffer, Payload, Precision, at_most, bytes_of
from umbel.aggregation.codec.vectors.codec import CodecContext, chunk_lengths, chunks, require_encodable
from umbel.aggregation.model.layout import Layout


@dataclass(frozen=True, slots=True)
class Planes:
    """All values, in one precision."""

    precision: Precision = Precision.FLOAT32
    is_linear: bool = field(default=False, init=False)
    is_contraction: bool = field(default=True, init=False)

    def payload_bytes(self, layout: Layout) -> range:
        return range(1, framed_bytes_max(layout.n_values * self.precision.n_bytes) + 1)

    def encode(self, values: Tensor, context: CodecContext) -> Iterator[bytes]:
        require_encodable(values, context)
        yield from compress(self._planes(values), context.n_values * self.precision.n_bytes)

    def decode(self, pieces: Iterable[Buffer], context: CodecContext) -> Iterator[Tensor]:
        framed = at_most(pieces, self.payload_bytes(context.layout)[-1])
        payload = Payload(decompress(framed, context.n_values * self.precision.n_bytes))
        for n in chunk_lengths(context.n_values):
            planes = payload.take(n * self.precision.n_bytes).view(self.precision.n_bytes, n)
            yield self.precision.read(planes.T.reshape(-1))
        payload.end()

    def _planes(self, values: Tensor) -> Iterator[bytes]:
        for place in chunks(values.numel()):
            written = self.precision.written(values[place])
            yield from bytes_of(written.view(-1, self.precision.n_bytes).T.reshape(-1))
