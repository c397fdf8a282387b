"""EDEN: any vector in 1 to 8 bits a coordinate, at the error of the best quantizer of a Gaussian.

Vargaftik, Ben Basat, Portnoy, Mendelson, Ben-Itzhak and Mitzenmacher: EDEN: communication-efficient and robust
distributed mean estimation for federated learning (ICML 2022). One bit is DRIVE (the same authors, NeurIPS 2021).

With a random rotation R, y = R x looks Gaussian. Scaled to unit variance it is rounded to the nearest of the 2^b points
of the Lloyd-Max quantizer of N(0, 1) (Max 1960), and read as

    x^ = S R^-1 Q(y / sigma),     S = ||x||^2 / <y, Q(y / sigma)>.

**Unbiased** over uniformly random rotations: <x, x^> = ||x||^2 always, and what is orthogonal to x averages out by
symmetry. The rotation here is the randomized Hadamard transform in blocks (`rotation.py`), which has fewer symmetries.
So an error remains that no number of keys averages out, mainly in small blocks of unequal values (at one bit, spikes of
3 and 1 among zeros are always read as 10/3 and 0). For log-normal values at one bit its square is 5 % of ||x||^2 in
blocks of 16 (a vector of 300), 1.4 % in blocks of 256, below 1e-4 in blocks of 4,096; at four bits, or for Gaussian
values, below 1e-5 in blocks of 256 already. Each block has its own scale; one scale for all would be biased if energies
differ.
**Not linear**: points and scales are each client's own, and so is the rotation: with a shared one the clients' errors
would agree, and the mean would keep them. Stateless.
**Cost**: b bits a coordinate, 32 bits a block (of 4,096 coordinates in a vector of 32,768 and more), and padding to
whole blocks. Error: E||x^ - x||^2 = D / (1 - D) ||x||^2, with D the Lloyd-Max distortion at b bits.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.aggregation.codec.entropy.payload import Buffer, Payload, bytes_of, require_finite, scales_written
from umbel.aggregation.codec.vectors.codec import CodecContext, chunks, one_length, require_encodable
from umbel.aggregation.kernels.arguments import Blocks
from umbel.aggregation.kernels.kernels import rotate_into
from umbel.aggregation.kernels.packing import pack, packed_bytes, unpack_all
from umbel.aggregation.kernels.rotation import unrotate
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.stated_order import total

_Floats: TypeAlias = NDArray[np.float64]
BITS_MAX = 8
POINT_UNITS = 1 << 20
_NEWTON_STEPS_MAX = 50
_CONVERGED = 1e-11  # the rest is rounding, 6e-13 at 8 bits


@dataclass(frozen=True, slots=True)
class Eden:
    """`bits` a coordinate, 1 to 8."""

    bits: int = 4
    is_linear: bool = field(default=False, init=False)
    is_contraction: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= BITS_MAX:
            raise ValueError(f"`bits` must lie between 1 and {BITS_MAX}, not {self.bits}")

    def payload_bytes(self, layout: Layout) -> range:
        """An empty vector still has a block."""
        blocks = Blocks.of(layout.n_values)
        return one_length(4 * blocks.n_blocks + packed_bytes(blocks.n_padded, self.bits))

    def encode(self, values: Tensor, context: CodecContext) -> Iterator[bytes]:
        """Scales, then levels, in block order."""
        require_encodable(values, context)
        blocks = Blocks.of(context.n_values)
        coded = [self._coded(part) for part in _rotated(values, blocks, context.own_key("eden"))]
        yield from bytes_of(scales_written(torch.cat([scales for scales, _ in coded])))
        for _, packed in coded:
            yield from bytes_of(packed)

    def decode(self, pieces: Iterable[Buffer], context: CodecContext) -> Iterator[Tensor]:
        """Needs memory for the whole vector, because of the inverse rotation."""
        payload, blocks = Payload(pieces), Blocks.of(context.n_values)
        scales = payload.take_scales(blocks.n_blocks).unsqueeze(1)
        rotated, points = torch.empty(blocks.n_blocks, blocks.size), self._points(scales.device)
        for place in chunks(blocks.n_padded):
            n, rows = place.stop - place.start, slice(place.start // blocks.size, place.stop // blocks.size)
            levels = unpack_all(payload.take(packed_bytes(n, self.bits)), n, self.bits)
            torch.mul(points[levels].view(-1, blocks.size), scales[rows], out=rotated[rows])
        payload.end()
        values = require_finite(unrotate(rotated.view(-1), blocks, context.own_key("eden")))
        yield from (values[place] for place in chunks(context.n_values))

    def _coded(self, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """The scales, float64, and the packed levels of some blocks, one a row."""
        squares = total(rotated.to(torch.float64).square_())
        deviations = (squares / rotated.shape[1]).sqrt_()
        inverse = torch.where(deviations > 0, 1 / deviations, 0.0).to(torch.float32)
        points = self._points(rotated.device)
        levels = torch.bucketize(rotated * inverse.unsqueeze(1), (points[1:] + points[:-1]) / 2, right=True)
        along = total((rotated * points[levels]).to(torch.float64))
        return torch.where(squares > 0, squares / along, 0.0), pack(levels.view(-1).to(torch.int32), self.bits)

    def _points(self, device: torch.device) -> Tensor:
        return torch.tensor(lloyd_max(self.bits), dtype=torch.float32, device=device)


def _rotated(values: Tensor, blocks: Blocks, key: int) -> Iterator[Tensor]:
    """The rotated vector, chunk by chunk: blocks, one a row. Each chunk is a new tensor."""
    for place in chunks(blocks.n_padded):
        part = values.new_empty(place.stop - place.start)
        rotate_into(part, values, blocks, key, place.start)
        yield part.view(-1, blocks.size)


@cache
def lloyd_max(bits: int) -> tuple[float, ...]:
    """The 2^bits points of the best quantizer of N(0, 1), ascending, in multiples of 2^-20.

    None of the 255 numbers for all widths is within 10^-9 of a rounding boundary (`test_eden.py`), a thousand times the
    difference between libraries. So the points are the same on every machine.
    """
    upper = (np.round(upper_points(bits) * POINT_UNITS) / POINT_UNITS).tolist()
    return (*(-point for point in reversed(upper)), *upper)


def upper_points(bits: int) -> _Floats:
    """The positive half, before rounding, by Newton's method.

    Each point is the mean of the values nearest to it: c_i = m(t_(i-1), t_i) with t_i = (c_i + c_(i+1)) / 2.
    """
    points = _first_guess(1 << (bits - 1))
    for _ in range(_NEWTON_STEPS_MAX):
        step = np.linalg.solve(*_residuals(points))
        points = points - step
        if float(np.abs(step).max()) < _CONVERGED:
            return points
    raise ArithmeticError(
        f"the levels of the EDEN codec for {bits} bits could not be computed: Newton's method does not converge"
    )


def _first_guess(n_points: int) -> _Floats:
    """Many points have a density of p^(1/3) (Panter and Dite 1951), which is that of N(0, 3)."""
    wide = NormalDist(0.0, math.sqrt(3.0))
    return np.array([wide.inv_cdf(0.5 + (i + 0.5) / (2 * n_points)) for i in range(n_points)])


def _residuals(points: _Floats) -> tuple[_Floats, _Floats]:
    """The Jacobian of c - m, and c - m. m'(a) = p(a) (m - a) / P and m'(b) = p(b) (b - m) / P."""
    edges = [0.0, *((points[1:] + points[:-1]) / 2).tolist(), math.inf]
    tails = np.array([math.erfc(edge / math.sqrt(2)) / 2 for edge in edges])
    densities = np.array([math.exp(-edge * edge / 2) / math.sqrt(2 * math.pi) for edge in edges])
    masses = tails[:-1] - tails[1:]
    means = (densities[:-1] - densities[1:]) / masses
    inner = np.array(edges[1:-1])
    by_left = densities[1:-1] * (means[1:] - inner) / masses[1:] / 2
    by_right = densities[1:-1] * (inner - means[:-1]) / masses[:-1] / 2
    jacobian = np.eye(len(points)) - np.diag(by_left, -1) - np.diag(by_right, 1)
    jacobian[np.arange(1, len(points)), np.arange(1, len(points))] -= by_left
    jacobian[np.arange(len(points) - 1), np.arange(len(points) - 1)] -= by_right
    return jacobian, points - means
