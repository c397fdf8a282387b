"""The exact weighted sum of a round's updates as integers: one int64 vector and the sum of weights.

Integer addition is associative and commutative, so any arrival order, any number of partial sums and any replay give
the same bits. The codec defines what the integers stand for, and their mean (`update_codec.py`).

Memory is one int64 vector, twice the float32 model, however many clients report.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from umbel.aggregation.codec.kernels.kernels import add_levels
from umbel.aggregation.errors import LyingLength
from umbel.aggregation.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor

_HASHED_VALUES = 1 << 20  # at a time


class IntegerSum:
    """A sum of `n_sums` coordinates. Not thread-safe.

    The caller must ensure that no coordinate times `total_weight_max` exceeds 2^62.
    """

    def __init__(self, n_sums: int, total_weight_max: int) -> None:
        self.n_sums = n_sums
        self.total_weight_max = total_weight_max
        self.total_weight = 0
        self.n_folded = 0
        self._sum = torch.zeros(n_sums, dtype=torch.int64)

    def add(self, chunks: Iterable[Tensor], weight: int) -> None:
        """Add `weight` times an update, given as consecutive chunks of `n_sums` integers in all.

        Raises `ValueError` for a weight below 1 or a total above `total_weight_max`, `LyingLength` for a wrong number
        of integers. After an error the sum is undefined: build a new one from the stored updates.
        """
        self._add_weight(weight)
        self._add_all(chunks, weight)
        self.n_folded += 1

    def merge_sums(self, pieces: Iterable[Tensor], total_weight: int, n_folded: int) -> None:
        """Add another partial sum of the same round, given as its `sums` in consecutive int64 pieces.

        Gives the same bits as adding its updates here. Raises `ValueError` for a total weight above the bound and
        `LyingLength` for a wrong number of integers; then the sum is undefined.
        """
        self._add_weight(total_weight, least=0)
        self._add_all(pieces, 1)
        self.n_folded += n_folded

    @property
    def sums(self) -> Tensor:
        """The integers: int64, `n_sums`, read-only."""
        return self._sum

    def _add_all(self, pieces: Iterable[Tensor], weight: int) -> None:
        offset = 0
        for piece in pieces:
            end = offset + piece.numel()
            if end > self.n_sums:
                raise LyingLength(f"there are more than the {self.n_sums} integers of the sum")
            add_levels(self._sum[offset:end], piece, weight)
            offset = end
        if offset != self.n_sums:
            raise LyingLength(f"there are {offset} integers, the sum has {self.n_sums}")

    def _add_weight(self, weight: int, least: int = 1) -> None:
        total = self.total_weight + weight
        if weight < least or total > self.total_weight_max:
            raise ValueError(f"weight {weight} takes the total to {total}, allowed: 1 to {self.total_weight_max}")
        self.total_weight = total


def sum_sha256(total: IntegerSum) -> str:
    """The SHA-256 of a sum's integers as int64, little-endian, in hex. Audit bundles have it."""
    return integers_sha256(total.sums)


def integers_sha256(*vectors: Tensor) -> str:
    """The SHA-256 of these integers, one vector after the other, as int64, little-endian, in hex."""
    sha = hashlib.sha256()
    for vector in vectors:
        for part in torch.split(vector, _HASHED_VALUES):
            sha.update(part.to(torch.int64).numpy().astype("<i8", copy=False).data)
    return sha.hexdigest()
