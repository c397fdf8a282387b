"""What goes over a client's line, counted at the client's end of it: what the records of its coordinator must say."""

from collections.abc import AsyncIterator, Callable, Iterator

import httpx


class Meter:
    """Bytes of bodies as they were on the wire, of requests that were not refused.

    `up`: of updates and of messages of secure rounds, `down`: of models and of such messages; `messages_up`,
    `messages_down`: of these alone.
    """

    def __init__(self) -> None:
        self.up = self.down = self.messages_up = self.messages_down = 0

    def through(self, request: httpx.Request, response: httpx.Response) -> httpx.Response:
        """The response, of which every byte is counted as it is read. The request has been read."""
        if not response.is_success:
            return response
        path = request.url.path
        is_message = "/secure/" in path
        if is_message or path.endswith("/update"):
            self._note_up(len(request.content), is_message)
        if is_message or path.startswith("/v1/models/"):
            response.stream = _Counted(response.stream, lambda n_bytes: self._note_down(n_bytes, is_message))
        return response

    def _note_up(self, n_bytes: int, is_message: bool) -> None:
        self.up += n_bytes
        self.messages_up += n_bytes * is_message

    def _note_down(self, n_bytes: int, is_message: bool) -> None:
        self.down += n_bytes
        self.messages_down += n_bytes * is_message


class MeteredTransport(httpx.AsyncBaseTransport):
    """A way to the coordinator with a meter in it."""

    def __init__(self, inner: httpx.AsyncBaseTransport, meter: Meter) -> None:
        self._inner, self._meter = inner, meter

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        return self._meter.through(request, await self._inner.handle_async_request(request))


class _Counted(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body, read in either way; `note` is told of each piece, in bytes."""

    def __init__(self, inner: object, note: Callable[[int], None]) -> None:
        self._inner, self._note = inner, note

    def __iter__(self) -> Iterator[bytes]:
        assert isinstance(self._inner, httpx.SyncByteStream)
        for piece in self._inner:
            self._note(len(piece))
            yield piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert isinstance(self._inner, httpx.AsyncByteStream)
        async for piece in self._inner:
            self._note(len(piece))
            yield piece

    def close(self) -> None:
        assert isinstance(self._inner, httpx.SyncByteStream)
        self._inner.close()

    async def aclose(self) -> None:
        assert isinstance(self._inner, httpx.AsyncByteStream)
        await self._inner.aclose()
