"""Low rank: each matrix's change H becomes A B; the whole cohort knows the random factor A, and a client sends B.

Konecny, McMahan, Yu, Richtarik, Suresh and Bacon: Federated learning: strategies for improving communication
efficiency (2016), structured updates: A (m x r) is drawn from the round's key and frozen, the client trains B (r x n).

The entries of A are odd multiples of 2^-24 between -1 and 1, taken from the words of Philox, and A B is summed column
by column of A. So decoding has a stated order, and the same bits on every machine. Only the span of A matters, so only
the client makes its columns orthogonal, for itself. A tensor of two or more dimensions is a matrix of its first
dimension by all others. A tensor that is no matrix, or has at most r rows, is sent whole.

Let P be the projection onto the columns of A. The entries are independent, identically distributed and symmetric about
zero, so E[P] = (r / m) I.

- Structured: B is the least-squares solution for the given A, so A B = P H. A change that the client made within the
  span of A (`projections`) is decoded exactly, any other change as its projection. **Biased**, and a contraction:
  E||A B - H||^2 = (1 - r / m) ||H||^2.
- Sketched: m / r times that B, so A B = (m / r) P H. **Unbiased**, with an error of (m / r - 1) ||H||^2, which is
  large: most changes need the structured kind.

**Linear**, up to float32's rounding: the whole cohort has the same A. Stateless.
**Cost**: 32 r bits for each of a matrix's n columns, so 32 r / m bits a coordinate.

Encoding solves for B with a library's arithmetic, so the last bits of B may differ (docs/reference/bits.md).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from umbel.aggregation.codec.entropy.payload import Buffer, Payload, Precision, bytes_of, require_finite, scales_written
from umbel.aggregation.codec.vectors.codec import (
    VALUE_BYTES,
    CodecContext,
    Projections,
    Sketching,
    one_length,
    require_encodable,
)
from umbel.aggregation.kernels.philox import Stream, words_by_coordinate
from umbel.aggregation.model.layout import Layout, TensorSpec

RANK_MAX = 1 << 12
_BITS = 24  # of a word; with the half that makes entries symmetric about zero, float32 holds them
_FACTORS_KEPT = 64  # matrices, of the newest rounds


@dataclass(frozen=True, slots=True)
class LowRank:
    """The codec of one rank for all matrices."""

    rank: int = 4  # r
    mode: Sketching = Sketching.STRUCTURED
    is_linear: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= RANK_MAX:
            raise ValueError(f"`rank` must lie between 1 and {RANK_MAX}, not {self.rank}")

    @property
    def is_contraction(self) -> bool:
        return self.mode is Sketching.STRUCTURED

    def payload_bytes(self, layout: Layout) -> range:
        return one_length(VALUE_BYTES * sum(map(self._n_sent, layout.owners())))

    def factor(self, spec: TensorSpec, context: CodecContext) -> Tensor | None:
        """A for this tensor: float32, (m, r). None for a tensor that is sent whole."""
        return _factor(*self._drawn(spec, context)) if self._is_factored(spec) else None

    def projections(self, context: CodecContext) -> Projections:
        """By matrix, the projection of a gradient onto the changes A B that can be sent."""
        factored = (spec for spec in context.layout.owners() if self._is_factored(spec))
        return {spec.name: _onto(_basis(*self._drawn(spec, context))[0]) for spec in factored}

    def encode(self, values: Tensor, context: CodecContext) -> Iterator[bytes]:
        """Tensor by tensor: B row by row, or all values."""
        require_encodable(values, context)
        for spec in context.layout.owners():
            sent = values[spec.place]
            if self._is_factored(spec):
                sent = self._solved(sent.view(spec.shape[0], -1), spec, context).reshape(-1)
            yield from bytes_of(scales_written(sent))

    def decode(self, pieces: Iterable[Buffer], context: CodecContext) -> Iterator[Tensor]:
        """A chunk is a tensor."""
        payload = Payload(pieces)
        for spec in context.layout.owners():
            sent = Precision.FLOAT32.read(payload.take(VALUE_BYTES * self._n_sent(spec)))
            factor = self.factor(spec, context)
            yield sent if factor is None else require_finite(_product(factor, sent.view(self.rank, -1)).view(-1))
        payload.end()

    def _solved(self, change: Tensor, spec: TensorSpec, context: CodecContext) -> Tensor:
        """B, float64: with A = Q R, R B = Q' H, times m / r if sketched."""
        basis, corner = (one.to(change.device) for one in _basis(*self._drawn(spec, context)))
        # A GPU may be set to multiply float32 in TF32, with 11 bits.
        wide = torch.float32 if change.device.type == "cpu" else torch.float64
        along = (basis.T.to(wide) @ change.to(wide)).to(torch.float64)
        solved: Tensor = torch.linalg.solve_triangular(corner, along, upper=True)
        return solved * (spec.shape[0] / self.rank) if self.mode is Sketching.SKETCHED else solved

    def _drawn(self, spec: TensorSpec, context: CodecContext) -> tuple[int, int, int]:
        """The arguments of A: the cohort's key for this tensor, m and r."""
        return context.shared_key("lowrank", spec.name), spec.shape[0], self.rank

    def _n_sent(self, spec: TensorSpec) -> int:
        return spec.n_values // spec.shape[0] * self.rank if self._is_factored(spec) else spec.n_values

    def _is_factored(self, spec: TensorSpec) -> bool:
        return len(spec.shape) >= 2 and spec.shape[0] > self.rank and spec.n_values > 0


@lru_cache(maxsize=_FACTORS_KEPT)
def _factor(key: int, n_rows: int, rank: int) -> Tensor:
    """A; read-only."""
    upper = words_by_coordinate(key, Stream.FACTOR, 0, n_rows * rank) >> (32 - _BITS)
    return (2 * upper + 1 - (1 << _BITS)).to(torch.float32).mul_(2.0**-_BITS).view(n_rows, rank)


@lru_cache(maxsize=_FACTORS_KEPT)
def _basis(key: int, n_rows: int, rank: int) -> tuple[Tensor, Tensor]:
    """Q, float32, and R, float64, with A = Q R; read-only. By a library's arithmetic, so never for decoding."""
    q, r = torch.linalg.qr(_factor(key, n_rows, rank).to(torch.float64))
    return q.to(torch.float32), r


def _onto(basis: Tensor) -> Callable[[Tensor], Tensor]:
    """The orthogonal projection onto these columns, for gradients of the matrix's own shape."""

    def project(gradient: Tensor) -> Tensor:
        q = basis.to(gradient)
        projected: Tensor = q @ (q.T @ gradient.reshape(q.shape[0], -1))
        return projected.view(gradient.shape)

    return project


def _product(factor: Tensor, sent: Tensor) -> Tensor:
    """A B, added in a stated order, because a library's order depends on the machine."""
    product = factor[:, :1] * sent[:1]
    for column in range(1, factor.shape[1]):
        product += factor[:, column, None] * sent[column]
    return product
