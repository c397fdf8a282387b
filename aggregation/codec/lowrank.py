"""Low rank: of each matrix's change H a random factor A is known to all, and only B of H = A B is sent.

Konecny, McMahan, Yu, Richtarik, Suresh and Bacon: Federated learning: strategies for improving communication
efficiency (2016), structured updates: A (m x r) is drawn from the round's key and frozen, the client trains B (r x n).

A is sqrt(m / r) times a matrix Q of orthonormal columns that is uniform among all such (Gaussian numbers from Philox,
orthonormalized). Libraries differ in the last bits of that, so A is rounded to 2^-16, and A B summed column by column
of A: it is the same on every machine. A tensor of two dimensions and more is a matrix of its first dimension by all
others. What is no matrix, or has no more than r rows, is sent whole.

- Structured: B is the least-squares solution for the given A, so A B = Q Q' H: a change that the client made within the
  span of A (`factor` says which that is) comes back as it is, of any other its projection. **Biased**, and it never
  moves away: E||A B - H||^2 = (1 - r / m) ||H||^2.
- Sketched: B = A' H, so A B = (m / r) Q Q' H. **Unbiased**, as E[Q Q'] = (r / m) I, with an error of
  (m / r - 1) ||H||^2, which is large: most changes want the structured kind.

**Linear**, up to float32's rounding: all of the cohort have the same A. Stateless.
**Cost**: 32 r bits for each of a matrix's n columns, so 32 r / m bits a coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from umbel.aggregation.codec.codec import VALUE_BYTES, Context, Mode, Projections, one_length, require_encodable
from umbel.aggregation.codec.payload import Buffer, Payload, Precision, bytes_of, require_finite, scales_written
from umbel.aggregation.codec.philox import Stream, words
from umbel.aggregation.layout import Layout, TensorSpec
from umbel.aggregation.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor

RANK_MAX = 1 << 12
_UNITS = 1 << 16
_FACTORS_KEPT = 64  # matrices, of the newest rounds


@dataclass(frozen=True, slots=True)
class LowRank:
    """`rank`: r, of every matrix."""

    rank: int = 4
    mode: Mode = Mode.STRUCTURED
    is_linear: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= RANK_MAX:
            raise ValueError(f"the rank must lie between 1 and {RANK_MAX}, not {self.rank}")

    @property
    def is_unbiased(self) -> bool:
        return self.mode is Mode.SKETCHED

    @property
    def is_contraction(self) -> bool:
        return self.mode is Mode.STRUCTURED

    def payload_bytes(self, layout: Layout) -> range:
        return one_length(VALUE_BYTES * sum(map(self._n_sent, layout.owners())))

    def factor(self, spec: TensorSpec, context: Context) -> Tensor | None:
        """A of this tensor: float32, (m, r), for a client that trains B alone. None for what is sent whole."""
        if not self._is_factored(spec):
            return None
        return _factor(context.shared_key("lowrank", spec.name), spec.shape[0], self.rank)

    def projections(self, context: Context) -> Projections:
        """By matrix, what takes a gradient to the changes A B: a step along it is one that trains B alone would make,
        but for B's own scale."""
        factors = ((spec, self.factor(spec, context)) for spec in context.layout.owners())
        return {spec.name: _onto(factor) for spec, factor in factors if factor is not None}

    def encode(self, values: Tensor, context: Context) -> Iterator[bytes]:
        """Tensor by tensor: B row by row, or all values."""
        require_encodable(values, context)
        for spec in context.layout.owners():
            sent = values[spec.place]
            if (factor := self.factor(spec, context)) is not None:
                sent = self._sketch(factor.to(values.device), sent.view(spec.shape[0], -1)).reshape(-1)
            yield from bytes_of(scales_written(sent))

    def decode(self, pieces: Iterable[Buffer], context: Context) -> Iterator[Tensor]:
        """A chunk is a tensor."""
        payload = Payload(pieces)
        for spec in context.layout.owners():
            sent = Precision.FLOAT32.read(payload.take(VALUE_BYTES * self._n_sent(spec)))
            factor = self.factor(spec, context)
            yield sent if factor is None else require_finite(_product(factor, sent.view(self.rank, -1)).view(-1))
        payload.end()

    def _sketch(self, factor: Tensor, change: Tensor) -> Tensor:
        """B. A' A is I m / r but for A's rounding, so it can be solved for."""
        sketch = factor.T @ change
        return sketch if self.mode is Mode.SKETCHED else torch.linalg.solve(factor.T @ factor, sketch)

    def _n_sent(self, spec: TensorSpec) -> int:
        return spec.n_values // spec.shape[0] * self.rank if self._is_factored(spec) else spec.n_values

    def _is_factored(self, spec: TensorSpec) -> bool:
        return len(spec.shape) >= 2 and spec.shape[0] > self.rank and spec.n_values > 0


@lru_cache(maxsize=_FACTORS_KEPT)
def _factor(key: int, n_rows: int, rank: int) -> Tensor:
    """A, to read only: all clients of a cohort have the same, and to make it takes longer than to multiply by it."""
    columns = _orthonormal(key, n_rows, rank)
    return columns.mul_(math.sqrt(n_rows / rank) * _UNITS).round_().div_(_UNITS).to(torch.float32)


def _onto(factor: Tensor) -> Callable[[Tensor], Tensor]:
    """The orthogonal projection onto the columns of A, for gradients of the matrix's own shape."""
    q = torch.linalg.qr(factor)[0]

    def project(gradient: Tensor) -> Tensor:
        basis = q.to(gradient)
        projected: Tensor = basis @ (basis.T @ gradient.reshape(basis.shape[0], -1))
        return projected.view(gradient.shape)

    return project


def _product(factor: Tensor, sent: Tensor) -> Tensor:
    """A B, in one order of additions: a library's own depends on the machine."""
    product = factor[:, :1] * sent[:1]
    for column in range(1, factor.shape[1]):
        product += factor[:, column, None] * sent[column]
    return product


def _orthonormal(key: int, n_rows: int, n_columns: int) -> Tensor:
    """Uniform among the float64 matrices of orthonormal columns, on the CPU.

    R's diagonal is made positive: only then is Q R unique, the same from every library.
    """
    q, r = np.linalg.qr(_gaussian(key, n_rows * n_columns).view(n_rows, n_columns).numpy())
    return torch.from_numpy(q * np.sign(r.diagonal()))


def _gaussian(key: int, n_values: int) -> Tensor:
    """float64, by Box and Muller (1958): two from each pair of words."""
    four = words(key, Stream.FACTOR, 0, -(-n_values // 4))
    u = [(word.to(torch.float64) + 0.5) * 2.0**-32 for word in four]
    pairs = [((-2 * u[i].log()).sqrt(), 2 * math.pi * u[i + 1]) for i in (0, 2)]
    made = [radius * turned for radius, angle in pairs for turned in (angle.cos(), angle.sin())]
    return torch.stack(made, dim=1).view(-1)[:n_values]
