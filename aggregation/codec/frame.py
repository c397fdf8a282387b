"""Bytes of a known length in one Zstandard frame; and back, from strangers, within a bound on memory.

The frame must say that it holds exactly the bytes that the plan asks for, in a window of 1 MiB at most, without a
dictionary; it is fed in small pieces; it must end there, and nothing may follow. (python-zstandard's `max_output_size`
is no such bound: it is ignored where a frame says its size.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import zstandard

from umbel.aggregation.errors import LyingLength, MalformedUpdate

WINDOW_BYTES_MAX = 1 << 20
_WINDOW_LOG = 19
_FEED_BYTES = 512  # a block of four bytes can hold 128 KiB: so at most 16 MiB come of one feed
_HEADER_BYTES_MAX = 18


def framed_bytes_max(n_raw: int) -> int:
    """No frame that `compress` makes of so many bytes is longer."""
    return n_raw + (n_raw >> 8) + 512


def compress(pieces: Iterable[bytes | memoryview], n_raw: int, level: int = 1) -> Iterator[bytes]:
    """A frame of these bytes, `n_raw` in all, piece by piece."""
    settings = zstandard.ZstdCompressionParameters.from_level(level, window_log=_WINDOW_LOG, write_checksum=False)
    compressor = zstandard.ZstdCompressor(compression_params=settings).compressobj(size=n_raw)
    for piece in pieces:
        yield compressor.compress(piece)
    yield compressor.flush()


def decompress(pieces: Iterable[bytes | memoryview], n_raw: int) -> Iterator[bytes]:
    """The bytes of a frame that holds `n_raw`, in pieces of at most 16 MiB. The frame comes in pieces of any length.

    Raises `MalformedUpdate` for what is no such frame, `LyingLength` for one that holds or claims another length.
    """
    frame = _Frame(n_raw)
    for piece in pieces:
        yield from frame.feed(piece)
    yield from frame.end()


class _Frame:
    """What has been read of a frame."""

    def __init__(self, n_raw: int) -> None:
        self._n_raw = n_raw
        self._n_seen = 0
        self._head: bytes | None = b""
        self._decoder = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX).decompressobj()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """The next bytes of it, once its header is whole and has been checked."""
        if self._head is not None:
            self._head += bytes(data)
            if len(self._head) < _HEADER_BYTES_MAX:
                return
            data = self._checked_head(self._head)
        for first in range(0, len(data), _FEED_BYTES):
            yield self._decoded(data[first : first + _FEED_BYTES])

    def end(self) -> Iterator[bytes]:
        """There is no more of it."""
        if self._head is not None:  # all of it is shorter than the longest header
            yield self._decoded(self._checked_head(self._head))
        if not self._decoder.eof:
            raise MalformedUpdate("the compressed update breaks off")
        if self._n_seen != self._n_raw:
            raise LyingLength(f"the compressed update holds {self._n_seen} bytes, not {self._n_raw}")

    def _decoded(self, data: bytes | memoryview) -> bytes:
        if self._decoder.eof:
            raise LyingLength("bytes follow the compressed update")
        try:
            raw = self._decoder.decompress(data)
        except zstandard.ZstdError as error:
            raise MalformedUpdate(f"the update cannot be decompressed: {error}") from error
        if self._decoder.unused_data:
            raise LyingLength("bytes follow the compressed update")
        self._n_seen += len(raw)
        if self._n_seen > self._n_raw:
            raise LyingLength(f"the compressed update holds more than {self._n_raw} bytes")
        return raw

    def _checked_head(self, head: bytes) -> bytes:
        """Refuse a frame by what its header says of it."""
        try:
            said = zstandard.get_frame_parameters(head)
        except zstandard.ZstdError as error:
            raise MalformedUpdate(f"not a Zstandard frame: {error}") from error
        if said.content_size != self._n_raw:
            is_unknown = said.content_size == zstandard.CONTENTSIZE_UNKNOWN
            claim = "no length" if is_unknown else f"{said.content_size} bytes"
            raise LyingLength(f"the compressed update claims {claim}; it must claim {self._n_raw} bytes")
        if said.window_size > WINDOW_BYTES_MAX:
            raise MalformedUpdate(f"the compressed update asks for a window of {said.window_size} bytes")
        if said.dict_id:
            raise MalformedUpdate("the compressed update asks for a dictionary; there is none")
        self._head = None
        return head
