"""The parameters of a rotation and of a quantization, which plans need without tensors."""

from dataclasses import dataclass

from umbel.aggregation.types import LEVEL_MAX

SIDE_MAX = 64
_SIDE_MIN = 4
_MANY_BLOCKS = 256  # from here on an odd number, because rows a power of two apart would share cache sets
_LEAST_BLOCKS = 8  # then padding adds an eighth at most, except to the smallest vectors


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a vector of `n_values` falls into the blocks of a rotation (`rotation.py`).

    They are `n_blocks` squares of `side` x `side`, padded with zeros in the last rows.
    """

    n_values: int
    n_blocks: int
    side: int

    @classmethod
    def of(cls, n_values: int) -> "Blocks":
        """The largest squares, up to 64 x 64, that give at least `_LEAST_BLOCKS`.

        From `_MANY_BLOCKS` on, the number of blocks is odd.
        """
        side = _SIDE_MIN
        while side < SIDE_MAX and _LEAST_BLOCKS * (2 * side) ** 2 <= n_values:
            side *= 2
        n_blocks = max(1, -(-n_values // side**2))
        return cls(n_values, n_blocks if n_blocks < _MANY_BLOCKS else n_blocks | 1, side)

    @property
    def size(self) -> int:
        """The number of coordinates in a block."""
        return self.side**2

    @property
    def n_padded(self) -> int:
        """The number of coordinates of the rotated vector."""
        return self.n_blocks * self.size


UNIT = 1 << 16
_GOLDEN = 40_503  # 2^16 times the golden ratio's fraction, rounded to an odd number: 65,536 clients differ


def phase(index: int) -> int:
    """phi of the client with this index in its cohort: 0 to 65,535."""
    return index * _GOLDEN % UNIT


@dataclass(frozen=True, slots=True)
class Levels:
    """The range of levels.

    A fixed width of b bits has 2^b levels. That is an even number, so they lie half a step off zero (`offset` = -2^15),
    symmetrically.
    """

    low: int = -LEVEL_MAX
    high: int = LEVEL_MAX
    offset: int = 0  # added before the cut, in 1/65,536 of a step

    @classmethod
    def of_width(cls, bits: int) -> "Levels":
        """The 2^bits levels around zero, for widths from 1 to 15."""
        if not 1 <= bits <= 15:
            raise ValueError(f"bits must lie between 1 and 15, not {bits}")
        return cls(-(1 << (bits - 1)), (1 << (bits - 1)) - 1, -(UNIT // 2))


@dataclass(frozen=True, slots=True)
class Quantizer:
    """How floats become levels (`quantize.py`)."""

    inverse_step: float
    key: int  # of the shared dither
    phi: int  # the client's part of the dither
    levels: Levels
