"""A model file as an HTTP answer, with ETag, If-None-Match and a single byte range (RFC 9110).

The file is streamed from a local copy, or the client is redirected to the bucket.
"""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from umbel.server.blobs.blobs import BlobStore, UnknownBlob
from umbel.server.problems import Refused

_log = logging.getLogger(__name__)
_PATIENCE_S = 1.0  # clients of short windows wait for an answer two seconds; asking again costs little
_ASK_AGAIN_S = 2
_PIECE_BYTES = 1 << 18
_RANGE = re.compile(r"bytes=(?:(?P<first>\d{1,15})-(?P<last>\d{1,15})?|-(?P<suffix>\d{1,15}))")
MEDIA_TYPE = "application/vnd.safetensors"
CHANGE_MEDIA_TYPE = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `start` to `stop` (exclusive) of a file."""

    start: int
    stop: int

    @property
    def n_bytes(self) -> int:
        return self.stop - self.start


def parse_range(header: str | None, size_bytes: int) -> Span | None:
    """The single range asked for. None, for the whole file, if the header is absent, malformed or lists several.

    Raises `Refused` for a range outside the file.
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
        detail = f"the requested range is outside the file, which has {size_bytes} bytes; ask for a range within it"
        raise Refused("range-not-satisfiable", detail, {"Content-Range": f"bytes */{size_bytes}"})
    return span


@dataclass(frozen=True, slots=True)
class Download:
    """The status and headers of the answer to a GET or HEAD of a model file or a change."""

    status: int
    headers: Mapping[str, str]
    span: Span
    media_type: str


def download(request: Request, sha256: str, size_bytes: int, media_type: str = MEDIA_TYPE) -> Download:
    """Raises `Refused` for a range outside the file."""
    etag = f'"{sha256}"'
    headers = {"ETag": etag, "Accept-Ranges": "bytes", "Cache-Control": "private, max-age=31536000, immutable"}
    if _matches(request.headers.get("if-none-match"), etag):
        return Download(304, headers, Span(0, 0), media_type)
    wants_range = request.headers.get("if-range", etag) == etag
    span = parse_range(request.headers.get("range"), size_bytes) if wants_range else None
    whole = Span(0, size_bytes)
    headers["Content-Length"] = str((span or whole).n_bytes)
    if span is None:
        return Download(200, headers, whole, media_type)
    headers["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{size_bytes}"
    return Download(206, headers, span, media_type)


def without_body(request: Request, wanted: Download) -> Response | None:
    """The answer to HEAD, or to a client that has the file already. None if bytes must follow."""
    if wanted.status != 304 and request.method != "HEAD":
        return None
    return Response(status_code=wanted.status, headers=wanted.headers, media_type=wanted.media_type)


def redirect(link: str) -> Response:
    """Send a client to a link that expires soon."""
    return Response(status_code=307, headers={"Location": link, "Cache-Control": "no-store"})


class FileAnswer(StreamingResponse):
    """Streams a span of a local file. `on_sent` is called with the length of each piece that was sent."""

    def __init__(self, copies: "LocalCopies", key: str, wanted: Download, on_sent: Callable[[int], None]) -> None:
        super().__init__((), wanted.status, wanted.headers, wanted.media_type)
        self._copies = copies
        self._key = key
        self._span = wanted.span
        self._on_sent = on_sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._copies.hold(self._key) as path:
            self.body_iterator = _pieces(path, self._span, self._on_sent)
            await super().__call__(scope, receive, send)


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
        raise OSError(f"the file {path.name} became shorter while it was being sent")
    return piece


def _matches(if_none_match: str | None, etag: str) -> bool:
    if if_none_match is None:
        return False
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in tags or etag in tags


class LocalCopies:
    """The local copies in use. One thread fetches a model for all clients that wait. Call it from one event loop."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._in_use: dict[str, _LocalCopy] = {}

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncGenerator[Path]:
        """A model's local file, for the length of the block. Raises `Refused` if it is late or deleted."""
        copy = self._in_use.get(key) or self._begin(key)
        copy.n_holders += 1
        try:
            yield await _soon(copy.fetch)
        finally:
            copy.n_holders -= 1
            self._let_go(key, copy)

    @property
    def n_in_use(self) -> int:
        return len(self._in_use)

    def _begin(self, key: str) -> "_LocalCopy":
        stack = ExitStack()
        fetch = asyncio.create_task(self._fetch(key, stack), name=f"copy of {key}")
        copy = self._in_use[key] = _LocalCopy(fetch, stack)
        fetch.add_done_callback(lambda _: self._let_go(key, copy))
        return copy

    async def _fetch(self, key: str, stack: ExitStack) -> Path:
        return await asyncio.to_thread(stack.enter_context, self._blobs.local(key))

    def _let_go(self, key: str, copy: "_LocalCopy") -> None:
        """Drop a copy that is unused or failed; the next request tries again."""
        if copy.n_holders or not copy.fetch.done() or self._in_use.get(key) is not copy:
            return
        del self._in_use[key]
        if not copy.fetch.cancelled() and (error := copy.fetch.exception()):
            _log.warning("could not copy the file %s from the store of models and updates: %s", key, error)
        asyncio.get_running_loop().run_in_executor(None, copy.stack.close)


@dataclass(slots=True)
class _LocalCopy:
    """One model's copy: the task that fetches it, what releases it, and the number of its users."""

    fetch: asyncio.Task[Path]
    stack: ExitStack
    n_holders: int = 0


async def _soon(fetch: asyncio.Task[Path]) -> Path:
    await asyncio.wait([fetch], timeout=_PATIENCE_S)
    if not fetch.done():
        detail = f"this coordinator is still copying the model from the store; ask again in {_ASK_AGAIN_S} s"
        raise Refused("storage-unavailable", detail, {"Retry-After": str(_ASK_AGAIN_S)})
    try:
        return fetch.result()
    except UnknownBlob as error:
        raise Refused("unknown-model", "this model was deleted; check in again to get a newer one") from error
