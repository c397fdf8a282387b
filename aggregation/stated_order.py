"""Arithmetic that comes out the same on every machine, for floats that are rounded or compared afterwards.

IEEE 754 rounds each sum, product, quotient and square root in one way. Three things differ from machine to machine: in
which order a library adds, whether it fuses a product with a sum, and the last bits of its logarithms. So additions
have a stated order here, and logarithms are made of products. Python's own `sum` of floats has none: from 3.12 on it
also adds up what it rounds off.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from umbel.aggregation.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor

_ROW = 1 << 16  # what is added up at a time stays in the second-level cache
_DIGITS = 40


def total(values: Tensor) -> Tensor:
    """The sums along the last dimension. `values`: float64, which are written over.

    The order: the second half is added to the first, place by place, until one is left; of an odd number the first half
    has one more. Every library adds place by place in the same way.
    """
    n = values.shape[-1]
    while n > 1:
        half = (n + 1) // 2
        values[..., : n - half] += values[..., half:n]
        n = half
    return values[..., 0] if n else values.new_zeros(values.shape[:-1])


def sum_of_squares(values: Tensor) -> float:
    """Of a float32 vector on any device. Each square is exact in float64; 65,536 of them at a time are a `total`, and
    those are added up exactly and rounded once.
    """
    n_whole = values.numel() // _ROW * _ROW
    rows = list(values[:n_whole].view(-1, _ROW).split(_rows_at_once(values)))
    if n_whole < values.numel():
        rows.append(values[n_whole:].view(1, -1))
    squares = (total(part.to(torch.float64).square_()) for part in rows)
    return math.fsum(one for part in squares for one in part.tolist())


def norm(values: Tensor) -> float:
    """The L2 norm of a float32 vector."""
    return math.sqrt(sum_of_squares(values))


def ceil_log2(value: float) -> int:
    """The least integer not below log2(value), for a finite value above zero."""
    mantissa, exponent = _halved(value)
    return exponent - (mantissa == 0.5)


def log2(value: float) -> float:
    """log2(value) of a finite value above zero, to 2^-40: squared, a number has twice the logarithm."""
    mantissa, exponent = _halved(value)
    mantissa, digits = 2 * mantissa, exponent - 1
    for _ in range(_DIGITS):
        mantissa *= mantissa
        digits *= 2
        if mantissa >= 2:
            mantissa, digits = mantissa / 2, digits + 1
    return math.ldexp(digits, -_DIGITS)


def _halved(value: float) -> tuple[float, int]:
    """m and e of m 2^e, with 1/2 <= m < 1."""
    if not 0 < value < math.inf:
        raise ValueError(f"only a finite value above zero has a logarithm, not {value!r}")
    return math.frexp(value)


def _rows_at_once(values: Tensor) -> int:
    return 1 if values.device.type == "cpu" else 256
