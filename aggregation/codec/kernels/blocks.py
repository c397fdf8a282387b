"""How a vector falls into the blocks of a rotation (`rotation.py`). Plans need this, and no tensors."""

from __future__ import annotations

from dataclasses import dataclass

SIDE_MAX = 64
_SIDE_MIN = 4
_MANY_BLOCKS = 256  # from here on an odd number, because rows a power of two apart would share cache sets
_LEAST_BLOCKS = 8  # then padding adds an eighth at most, except to the smallest vectors


@dataclass(frozen=True, slots=True)
class Blocks:
    """A vector of `n_values` as `n_blocks` squares of `side` x `side`, padded with zeros in the last rows."""

    n_values: int
    n_blocks: int
    side: int

    @classmethod
    def of(cls, n_values: int) -> Blocks:
        """The largest squares, up to 64 x 64, that give at least `_LEAST_BLOCKS`. Many blocks are an odd number."""
        side = _SIDE_MIN
        while side < SIDE_MAX and _LEAST_BLOCKS * (2 * side) ** 2 <= n_values:
            side *= 2
        n_blocks = max(1, -(-n_values // side**2))
        return cls(n_values, n_blocks if n_blocks < _MANY_BLOCKS else n_blocks | 1, side)

    @property
    def size(self) -> int:
        """The coordinates of a block."""
        return self.side**2

    @property
    def n_padded(self) -> int:
        """The coordinates of the rotated vector."""
        return self.n_blocks * self.size
