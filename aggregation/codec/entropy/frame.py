"""Bytes of a known length as one Zstandard frame, and back: frames from the network, within a bound on memory.

The frame must declare exactly the length that the plan expects, a window of at most 1 MiB, and no dictionary. It is
decompressed in small pieces, it must end in time, and nothing may follow it. (python-zstandard's `max_output_size` is
not a bound: it is ignored if a frame declares its size.)
"""

from collections.abc import Iterable, Iterator

import zstandard

from umbel.aggregation.codec.entropy.payload import Buffer
from umbel.aggregation.errors import LyingLength, MalformedUpdate

WINDOW_BYTES_MAX = 1 << 20
_WINDOW_LOG = 19
_FEED_BYTES = 512  # four bytes can hold a block of 128 KiB, so one feed gives at most 16 MiB
_HEADER_BYTES_MAX = 18


def framed_bytes_max(n_raw: int) -> int:
    """The greatest length of a frame that `compress` makes of `n_raw` bytes."""
    return n_raw + (n_raw >> 8) + 512


def compress(pieces: Iterable[Buffer], n_raw: int, level: int = 1) -> Iterator[bytes]:
    """A frame of these bytes, `n_raw` in all, piece by piece."""
    settings = zstandard.ZstdCompressionParameters.from_level(level, window_log=_WINDOW_LOG, write_checksum=False)
    compressor = zstandard.ZstdCompressor(compression_params=settings).compressobj(size=n_raw)
    for piece in pieces:
        yield compressor.compress(piece)
    yield compressor.flush()


def compress_apart(parts: Iterable[Buffer], n_raw: int, level: int = 1) -> bytes:
    """A frame of these bytes, `n_raw` in all. Each part has its own blocks, and so its own code tables."""
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=False).compressobj(size=n_raw)
    made = bytearray()
    for part in parts:
        made += compressor.compress(part)
        made += compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    return bytes(made + compressor.flush())


def compressed_bytes(parts: Iterable[Buffer], level: int = 1) -> list[int]:
    """The compressed length of each part alone."""
    compressor = zstandard.ZstdCompressor(level=level)
    return [len(compressor.compress(part)) for part in parts]


def decompress_whole(data: Buffer, lengths: range) -> bytes:
    """The bytes of a whole frame, whose declared and true length must be one of `lengths`.

    Raises `MalformedUpdate` for bytes that are not such a frame, and `LyingLength` for another length.
    """
    said = _parameters(data)
    if said.content_size not in lengths:
        raise LyingLength(f"the compressed update states {_claim(said)}; it must state {_allowed(lengths)}")
    _refuse_extremes(said)
    try:
        raw = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MalformedUpdate(f"the update cannot be decompressed: {error}") from error
    if len(raw) != said.content_size:
        raise LyingLength(
            f"the compressed update contains {len(raw)} bytes, not the {said.content_size} that it states"
        )
    return raw


def decompress(pieces: Iterable[Buffer], n_raw: int) -> Iterator[bytes]:
    """The `n_raw` bytes of a frame, in pieces of at most 16 MiB. The frame comes in pieces of any length.

    Raises `MalformedUpdate` for bytes that are not such a frame, and `LyingLength` for another length.
    """
    frame = _Frame(n_raw)
    for piece in pieces:
        yield from frame.feed(piece)
    yield from frame.end()


class _Frame:
    """Decompresses one frame, piece by piece."""

    def __init__(self, n_raw: int) -> None:
        self._n_raw = n_raw
        self._n_seen = 0
        self._head: bytes | None = b""
        self._decoder = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX).decompressobj()

    def feed(self, data: Buffer) -> Iterator[bytes]:
        """Decompress more bytes of the frame, once its header is complete and has been checked."""
        if self._head is not None:
            self._head += bytes(data)
            if len(self._head) < _HEADER_BYTES_MAX:
                return
            data = self._checked_head(self._head)
        for first in range(0, len(data), _FEED_BYTES):
            yield self._decoded(data[first : first + _FEED_BYTES])

    def end(self) -> Iterator[bytes]:
        """Decompress the rest, and check that the frame is complete."""
        if self._head is not None:  # the whole frame is shorter than the longest header
            yield self._decoded(self._checked_head(self._head))
        if not self._decoder.eof:
            raise MalformedUpdate("the compressed update ends too early")
        if self._n_seen != self._n_raw:
            raise LyingLength(f"the compressed update contains {self._n_seen} bytes, not {self._n_raw}")

    def _decoded(self, data: Buffer) -> bytes:
        if self._decoder.eof:
            raise LyingLength("there are bytes after the end of the compressed update")
        try:
            raw = self._decoder.decompress(data)
        except zstandard.ZstdError as error:
            raise MalformedUpdate(f"the update cannot be decompressed: {error}") from error
        if self._decoder.unused_data:
            raise LyingLength("there are bytes after the end of the compressed update")
        self._n_seen += len(raw)
        if self._n_seen > self._n_raw:
            raise LyingLength(f"the compressed update contains more than {self._n_raw} bytes")
        return raw

    def _checked_head(self, head: bytes) -> bytes:
        """Refuse a frame by its header; return the header."""
        said = _parameters(head)
        if said.content_size != self._n_raw:
            raise LyingLength(f"the compressed update states {_claim(said)}; it must state {self._n_raw} bytes")
        _refuse_extremes(said)
        self._head = None
        return head


def _parameters(head: Buffer) -> zstandard.FrameParameters:
    try:
        return zstandard.get_frame_parameters(head)
    except zstandard.ZstdError as error:
        raise MalformedUpdate(f"the update is not a Zstandard frame: {error}") from error


def _claim(said: zstandard.FrameParameters) -> str:
    return "no length" if said.content_size == zstandard.CONTENTSIZE_UNKNOWN else f"{said.content_size} bytes"


def _allowed(lengths: range) -> str:
    if len(lengths) == 1:
        return f"{lengths[0]} bytes"
    return f"{lengths[0]} to {lengths[-1]} bytes{f', in steps of {lengths.step}' if lengths.step > 1 else ''}"


def _refuse_extremes(said: zstandard.FrameParameters) -> None:
    if said.window_size > WINDOW_BYTES_MAX:
        raise MalformedUpdate(
            f"the compressed update needs a window of {said.window_size} bytes; at most {WINDOW_BYTES_MAX} are allowed"
        )
    if said.dict_id:
        raise MalformedUpdate("the compressed update needs a dictionary, which updates may not use")
