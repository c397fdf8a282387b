"""A model file as an HTTP answer: streamed in pieces, with ETag, If-None-Match and a single byte range (RFC 9110)."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from umbel.server.problems import Refused

_PIECE_BYTES = 1 << 18
_RANGE = re.compile(r"bytes=(?:(?P<first>\d{1,15})-(?P<last>\d{1,15})?|-(?P<suffix>\d{1,15}))")
MEDIA_TYPE = "application/vnd.safetensors"


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `start` to `stop` (exclusive) of a file."""

    start: int
    stop: int

    @property
    def n_bytes(self) -> int:
        return self.stop - self.start


def parse_range(header: str | None, size_bytes: int) -> Span | None:
    """The single range asked for, or None for the whole file: also where the header is malformed or lists several.

    Raises `Refused` for a range that lies outside.
    """
    match = _RANGE.fullmatch(header or "")
    if match is None:
        return None
    if match["suffix"] is not None:
        span = Span(max(0, size_bytes - int(match["suffix"])), size_bytes)
    else:
        last = int(match["last"]) if match["last"] else size_bytes - 1
        if last < int(match["first"]) < size_bytes:
            return None  # RFC 9110, section 14.1.1: an invalid range is ignored
        span = Span(int(match["first"]), min(last + 1, size_bytes))
    if span.start >= span.stop:
        detail = f"the file has {size_bytes} bytes; ask for a range within them"
        raise Refused("range-not-satisfiable", detail, {"Content-Range": f"bytes */{size_bytes}"})
    return span


def file_response(
    request: Request, path: Path, sha256: str, size_bytes: int, on_sent: Callable[[int], None]
) -> Response:
    """Answer GET or HEAD for a file named by its hash. `on_sent` is told of each piece that was sent, in bytes."""
    etag = f'"{sha256}"'
    headers = {"ETag": etag, "Accept-Ranges": "bytes", "Cache-Control": "private, max-age=31536000, immutable"}
    if _matches(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    wants_range = request.headers.get("if-range", etag) == etag
    span = parse_range(request.headers.get("range"), size_bytes) if wants_range else None
    status = 200
    if span is not None:
        status, headers["Content-Range"] = 206, f"bytes {span.start}-{span.stop - 1}/{size_bytes}"
    span = span or Span(0, size_bytes)
    headers["Content-Length"] = str(span.n_bytes)
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=MEDIA_TYPE)
    return StreamingResponse(_pieces(path, span, on_sent), status, headers, MEDIA_TYPE)


async def _pieces(path: Path, span: Span, on_sent: Callable[[int], None]) -> AsyncIterator[bytes]:
    offset = span.start
    while offset < span.stop:
        piece = await asyncio.to_thread(_read, path, offset, min(_PIECE_BYTES, span.stop - offset))
        yield piece
        offset += len(piece)
        on_sent(len(piece))


def _read(path: Path, offset: int, n_bytes: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        piece = file.read(n_bytes)
    if not piece:
        raise OSError(f"{path.name} is shorter than it was")
    return piece


def _matches(if_none_match: str | None, etag: str) -> bool:
    if if_none_match is None:
        return False
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in tags or etag in tags
