"""Masks: the keystreams that secure aggregation adds to a vector of integers, and takes off again.

    PRG(key) = AES-256-CTR keystream (NIST SP 800-38A, 6.5), first counter block 0, read as little-endian lanes

A lane has 1, 2, 4 or 8 bytes, as the vector's integers have, and wraps: a mask that is added and taken off leaves
nothing. Lane i of a keystream stands at its byte i * width, in counter block i * width / 16, so a vector can be masked
in parts, from any lane on, and in threads.

All keys run over one stretch of the vector before the next is begun: their keystreams stay in the second cache, where
adding costs a fifth of making them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from umbel.aggregation.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor

KEY_BYTES = 32
_BLOCK = 16  # bytes that one counter makes
_COUNTER_MAX = 1 << 128
_STRETCH = 1 << 18  # bytes: with as many zeros and as much keystream it fits a second cache of a megabyte
_ZEROS = memoryview(bytes(_STRETCH))
_SPARE = _BLOCK - 1  # bytes that update_into of some versions wants beyond what it writes
_CACHE_LINE = 64


class Masks:
    """Some clients' masks of one vector, each with its sign.

    For consecutive parts, `apply` goes on with the keystreams of the part before; elsewhere it sets them up again, at 4
    us each. They take 1.2 KB each, and 256 KiB in all, for as long as this lives. One thread at a time.
    """

    __slots__ = ("_at", "_keys", "_keystream", "_signs", "_streams")

    def __init__(self, keys: Sequence[bytes], signs: Sequence[int]) -> None:
        """`keys`: 32 bytes each, used for this vector only. `signs`: 1 adds that key's mask, -1 takes it off.

        Raises `ValueError` for keys of another length, other signs, or not one sign for each key.
        """
        if len(keys) != len(signs):
            raise ValueError(f"{len(keys)} keys need as many signs, not {len(signs)}")
        for key in keys:
            if len(key) != KEY_BYTES:
                raise ValueError(f"a mask's key has {KEY_BYTES} bytes, not {len(key)}")
        for sign in signs:
            if sign not in (1, -1):
                raise ValueError(f"a mask is added (1) or taken off (-1); {sign} is neither")
        self._keys, self._signs = tuple(keys), tuple(signs)
        self._streams: list[CipherContext] = []
        self._keystream = np.empty(_STRETCH + _SPARE, np.uint8)
        self._at: int | None = None  # the byte of the keystreams that comes next; None: they are not set up

    def apply(self, vector: Tensor, first: int = 0) -> None:
        """Add the masks, or take them off, in place: `vector` is the whole vector's lanes from `first` on.

        `vector`: int8, int16, int32 or int64, contiguous, one dimension, on the CPU. Raises `TypeError` for other types
        and `ValueError` for other shapes and places, before anything is changed.
        """
        lanes = _lanes(vector)
        begin = _begin(first, lanes)
        streams = self._streams if begin == self._at else [_stream(key, begin) for key in self._keys]
        self._streams, self._at = streams, None
        step = _STRETCH // lanes.itemsize
        for start in range(0, lanes.size, step):
            self._apply_stretch(lanes[start : start + step])
        self._at = begin + lanes.nbytes

    def jobs(self, vector: Tensor, n_jobs: int, first: int = 0) -> list[Callable[[], None]]:
        """`apply` as at most `n_jobs` calls on pieces of the vector, which threads may make at once and in any order.

        What is slow in them releases the GIL. Raises as `apply` does, and `ValueError` for no jobs.
        """
        lanes = _lanes(vector)
        _begin(first, lanes)
        if n_jobs < 1:
            raise ValueError(f"there must be one job at least, not {n_jobs}")
        length = _length_of_piece(lanes, n_jobs)
        starts = range(0, lanes.size, length)
        # Each has keystreams of its own, and no job sets them up before it runs.
        return [
            partial(Masks(self._keys, self._signs).apply, vector[start : start + length], first + start)
            for start in starts
        ]

    def _apply_stretch(self, lanes: NDArray[Any]) -> None:
        zeros, keystream = _ZEROS[: lanes.nbytes], self._keystream.data
        mask = self._keystream[: lanes.nbytes].view(lanes.dtype.newbyteorder("<"))
        for stream, sign in zip(self._streams, self._signs, strict=True):
            stream.update_into(zeros, keystream)
            if sign > 0:
                np.add(lanes, mask, out=lanes)
            else:
                np.subtract(lanes, mask, out=lanes)


def lane_dtype(bits: int) -> torch.dtype:
    """The narrowest lanes that hold integers of 1 to 64 bits: int8, int16, int32 or int64. Others: `ValueError`."""
    if not 1 <= bits <= 64:
        raise ValueError(f"a lane holds integers of 1 to 64 bits, not {bits}")
    return next(dtype for width, dtype in _lane_dtypes().items() if bits <= width)


def _lane_dtypes() -> dict[int, torch.dtype]:
    """By width in bits, from the narrowest on."""
    return {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def _lanes(vector: Tensor) -> NDArray[Any]:
    """The vector's memory as unsigned integers, which wrap."""
    if vector.dtype not in _lane_dtypes().values():
        raise TypeError(f"masks are added to int8, int16, int32 or int64, not {vector.dtype}")
    if vector.device.type != "cpu":
        raise ValueError(f"masks are added on the CPU; move the vector there from {vector.device}")
    if vector.dim() != 1 or not vector.is_contiguous():
        raise ValueError("masks are added to a contiguous vector of one dimension; make it one")
    return vector.numpy().view(f"u{vector.element_size()}")


def _begin(first: int, lanes: NDArray[Any]) -> int:
    """The byte of the keystreams that belongs to lane `first`."""
    begin = first * lanes.itemsize
    if begin < 0 or begin + lanes.nbytes > _COUNTER_MAX * _BLOCK:
        raise ValueError(f"a keystream has no {lanes.size} lanes from {first} on")
    return begin


def _stream(key: bytes, begin: int) -> CipherContext:
    block, skipped = divmod(begin, _BLOCK)
    stream = Cipher(AES256(key), CTR((block % _COUNTER_MAX).to_bytes(_BLOCK, "big"))).encryptor()
    if skipped:
        stream.update(bytes(skipped))
    return stream


def _length_of_piece(lanes: NDArray[Any], n_jobs: int) -> int:
    """Lanes that each of `n_jobs` does: whole cache lines, if the vector begins with one."""
    unit = _CACHE_LINE // lanes.itemsize
    return max(1, -(-lanes.size // (n_jobs * unit))) * unit
