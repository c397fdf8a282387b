"""Sums of floats in a stated order, so that every machine gets the same bits.

IEEE 754 fixes how each sum, product, quotient and square root is rounded. Three things still differ between machines:
the order in which a library adds, whether it fuses a product with a sum, and the last bits of its logarithms
(`logarithms.py`). Python's own `sum` has no fixed order of floats either: from 3.12 on it compensates for rounding.
"""

import math

import torch
from torch import Tensor

_ROW = 1 << 16  # what is added up at a time stays in the second-level cache


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


def _rows_at_once(values: Tensor) -> int:
    return 1 if values.device.type == "cpu" else 256
