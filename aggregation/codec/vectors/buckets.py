"""Buckets: runs of 4,096 neighbours with their own scale, because layers differ by orders of magnitude.

(1-bit SGD scales column by column, TernGrad layer by layer, QSGD bucket by bucket. Buckets follow layers nearly as well
as the layout does, and their cost depends on the number of values only.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from umbel.aggregation.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_VALUES = 1 << 12


def n_buckets(n_values: int) -> int:
    return -(-n_values // BUCKET_VALUES)


def in_buckets(values: Tensor) -> Tensor:
    """One dimension -> (n_buckets, BUCKET_VALUES), padded with zeros."""
    n_missing = n_buckets(values.numel()) * BUCKET_VALUES - values.numel()
    return torch.nn.functional.pad(values, (0, n_missing)).view(-1, BUCKET_VALUES)


def lengths(n_values: int, device: torch.device | str = "cpu") -> Tensor:
    """The number of values in each bucket: int64."""
    full = torch.full((n_buckets(n_values),), BUCKET_VALUES, dtype=torch.int64, device=device)
    if n_values % BUCKET_VALUES:
        full[-1] = n_values % BUCKET_VALUES
    return full


def by_value(scales: Tensor, n_values: int) -> Tensor:
    """The scale of each value's bucket."""
    return scales.repeat_interleave(BUCKET_VALUES)[:n_values]
