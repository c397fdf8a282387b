"""Models at hand as local files, for downloads: one thread fetches a model, however many clients wait for it."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from umbel.server.blobs.blobs import BlobStore, UnknownBlob
from umbel.server.problems import Refused

_log = logging.getLogger(__name__)
_PATIENCE_S = 1.0  # clients of short windows wait for an answer two seconds; asking again costs little
_ASK_AGAIN_S = 2


class Copies:
    """The local copies that are in use. All calls from one event loop."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._in_use: dict[str, _Copy] = {}

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncGenerator[Path]:
        """A model's local file, for the length of the block. Raises `Refused` while it is fetched, or if it is gone."""
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

    def _begin(self, key: str) -> "_Copy":
        stack = ExitStack()
        fetch = asyncio.create_task(self._fetch(key, stack), name=f"copy of {key}")
        copy = self._in_use[key] = _Copy(fetch, stack)
        fetch.add_done_callback(lambda _: self._let_go(key, copy))
        return copy

    async def _fetch(self, key: str, stack: ExitStack) -> Path:
        return await asyncio.to_thread(stack.enter_context, self._blobs.local(key))

    def _let_go(self, key: str, copy: "_Copy") -> None:
        """Forget a copy that nobody uses, or that could not be made: the next who asks has it tried again."""
        if copy.n_holders or not copy.fetch.done() or self._in_use.get(key) is not copy:
            return
        del self._in_use[key]
        if not copy.fetch.cancelled() and (error := copy.fetch.exception()):
            _log.warning("no copy of %s: %s", key, error)
        asyncio.get_running_loop().run_in_executor(None, copy.stack.close)


@dataclass(slots=True)
class _Copy:
    """One model's copy: what brings it, what lets it go, and how many use it."""

    fetch: asyncio.Task[Path]
    stack: ExitStack
    n_holders: int = 0


async def _soon(fetch: asyncio.Task[Path]) -> Path:
    await asyncio.wait([fetch], timeout=_PATIENCE_S)
    if not fetch.done():
        detail = f"the model is on its way from the store to this coordinator; ask again in {_ASK_AGAIN_S} s"
        raise Refused("storage-unavailable", detail, {"Retry-After": str(_ASK_AGAIN_S)})
    try:
        return fetch.result()
    except UnknownBlob as error:
        raise Refused("unknown-model", "this model is no longer kept here; take a newer one") from error
