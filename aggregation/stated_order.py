"""Sums of floats in a stated order, and logarithms made of products, so that every machine gets the same bits.

IEEE 754 fixes how each sum, product, quotient and square root is rounded. Four things still differ between machines:
the order in which a library adds, whether it fuses a product with a sum, the last bits of its logarithms, and those of
torch's square roots. Python's own `sum` has no fixed order of floats either: from 3.12 on it compensates for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # a run file is read without torch
    from torch import Tensor

_ROW = 1 << 16  # values at a time, so that they stay in the second-level cache


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


def divisor(by: float, values: Tensor) -> Tensor:
    """`by` as a tensor on the device of `values`, to divide them by it. By a number that is on the CPU a GPU would not
    divide: it would multiply by the inverse.
    """
    import torch

    return torch.tensor(by, dtype=values.dtype, device=values.device)


def square_roots(values: Tensor) -> Tensor:
    """The square roots, each rounded as IEEE 754 says. `values`: float64 in main memory, which are written over.

    numpy and the C library round them so. MKL, with which torch is built, has another last bit in one of a hundred.
    """
    found = values.numpy()
    with np.errstate(invalid="ignore"):  # a NaN of a negative value is its caller's to find
        np.sqrt(found, out=found)
    return values


def sum_of_squares(values: Tensor) -> float:
    """Of a float32 vector on any device. Each square is exact in float64; 65,536 of them at a time are a `total`, and
    those are added up exactly and rounded once.
    """
    n_whole = values.numel() // _ROW * _ROW
    rows = list(values[:n_whole].view(-1, _ROW).split(_rows_at_once(values)))
    if n_whole < values.numel():
        rows.append(values[n_whole:].view(1, -1))
    squares = (total(part.double().square_()) for part in rows)
    return math.fsum(one for part in squares for one in part.tolist())


def norm(values: Tensor) -> float:
    """The L2 norm of a float32 vector."""
    return math.sqrt(sum_of_squares(values))


def norm_of_pieces(pieces: Iterable[Tensor]) -> float:
    """The L2 norm of a vector that comes in pieces, float32; it may depend on where the vector is cut."""
    return math.sqrt(math.fsum(sum_of_squares(piece) for piece in pieces))


def _rows_at_once(values: Tensor) -> int:
    return 1 if values.device.type == "cpu" else 256


_DIGITS = 40


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


def power(base: float, exponent: float) -> float:
    """base^exponent of a base above zero. Its relative error is at most 2^-40 times the exponent, and 2^-40."""
    return _exp2(exponent * log2(base))


def _exp2(exponent: float) -> float:
    """2^exponent. Its fraction is read bit by bit, and each bit multiplies by a root of two."""
    whole = math.floor(exponent)
    fraction, root, found = exponent - whole, 2.0, 1.0
    for _ in range(_DIGITS):
        root, fraction = math.sqrt(root), 2 * fraction
        if fraction >= 1:
            fraction, found = fraction - 1, found * root
    return math.ldexp(found, whole)


def _halved(value: float) -> tuple[float, int]:
    """m and e of m 2^e, with 1/2 <= m < 1."""
    if not 0 < value < math.inf:
        raise ValueError(f"only a finite value above zero has a logarithm, not {value!r}")
    return math.frexp(value)
