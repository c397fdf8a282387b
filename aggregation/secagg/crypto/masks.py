"""Masks: the keystreams that secure aggregation adds to a vector of integers, and takes off again.

    PRG(key) = AES-256-CTR keystream (NIST SP 800-38A, 6.5), first counter block 0, read as little-endian lanes

A lane has 1, 2, 4 or 8 bytes, as the vector's integers have, and wraps, so a mask that is added and subtracted leaves
no trace. Lane i of a keystream is at its byte i * width, in counter block i * width / 16, so a vector can be masked in
parts, from any lane on.

All keys are applied to one stretch of the vector before the next stretch. So the keystreams stay in the second-level
cache, where adding one costs a fifth of making it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

if TYPE_CHECKING:  # a coordinator imports this before torch
    from torch import Tensor

KEY_BYTES = 32
_BLOCK = 16  # bytes that one counter makes
_COUNTER_MAX = 1 << 128
_STRETCH = 1 << 18  # bytes: with as many zeros and as much keystream it fits a second cache of a megabyte
_ZEROS = memoryview(bytes(_STRETCH))
_SPARE = _BLOCK - 1  # bytes that update_into of some versions needs beyond its output
_DTYPES = ("torch.int8", "torch.int16", "torch.int32", "torch.int64")


class Masks:
    """Some clients' masks of one vector, each with its sign. Not thread-safe.

    For consecutive parts, `apply` continues the keystreams; otherwise it sets them up again, at 4 us each. Each
    keystream takes 1.2 KB of memory, and all of them share a buffer of 256 KiB.
    """

    __slots__ = ("_at", "_keys", "_keystream", "_signs", "_streams")

    def __init__(self, keys: Sequence[bytes], signs: Sequence[int]) -> None:
        """`keys`: 32 bytes each, used for this vector only. `signs`: 1 adds that key's mask, -1 subtracts it.

        Raises `ValueError` for keys of another length, other signs, or not one sign for each key.
        """
        if len(keys) != len(signs):
            raise ValueError(f"each key needs one sign, but there are {len(keys)} keys and {len(signs)} signs")
        for key in keys:
            if len(key) != KEY_BYTES:
                raise ValueError(f"a mask's key must have {KEY_BYTES} bytes, not {len(key)}")
        for sign in signs:
            if sign not in (1, -1):
                raise ValueError(f"a sign must be 1 (add the mask) or -1 (subtract it), not {sign}")
        self._keys, self._signs = tuple(keys), tuple(signs)
        self._streams: list[CipherContext] = []
        self._keystream = np.empty(_STRETCH + _SPARE, np.uint8)
        self._at: int | None = None  # the byte of the keystreams that comes next; None: they are not set up

    def apply(self, vector: Tensor, first: int = 0) -> None:
        """Add or subtract the masks in place. `vector`: the whole vector's lanes from `first` on.

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

    def _apply_stretch(self, lanes: NDArray[Any]) -> None:
        zeros, keystream = _ZEROS[: lanes.nbytes], self._keystream.data
        mask = self._keystream[: lanes.nbytes].view(lanes.dtype.newbyteorder("<"))
        for stream, sign in zip(self._streams, self._signs, strict=True):
            stream.update_into(zeros, keystream)
            if sign > 0:
                np.add(lanes, mask, out=lanes)
            else:
                np.subtract(lanes, mask, out=lanes)


def _lanes(vector: Tensor) -> NDArray[Any]:
    """The vector's memory as unsigned integers, which wrap."""
    if str(vector.dtype) not in _DTYPES:
        raise TypeError(f"masks can be added to int8, int16, int32 or int64, not to {vector.dtype}")
    if vector.device.type != "cpu":
        raise ValueError(f"masks are added on the CPU, but the vector is on {vector.device}; move it to the CPU")
    if vector.dim() != 1 or not vector.is_contiguous():
        raise ValueError("masks can be added only to a contiguous vector of one dimension")
    return vector.numpy().view(f"u{vector.element_size()}")


def _begin(first: int, lanes: NDArray[Any]) -> int:
    """The byte of the keystreams that belongs to lane `first`."""
    begin = first * lanes.itemsize
    if begin < 0 or begin + lanes.nbytes > _COUNTER_MAX * _BLOCK:
        raise ValueError(f"the keystream is too short for {lanes.size} lanes from lane {first} on")
    return begin


def _stream(key: bytes, begin: int) -> CipherContext:
    block, skipped = divmod(begin, _BLOCK)
    stream = Cipher(AES256(key), CTR((block % _COUNTER_MAX).to_bytes(_BLOCK, "big"))).encryptor()
    if skipped:
        stream.update(bytes(skipped))
    return stream
