"""A thread for what must be worked out while a transaction is open, so that the event loop goes on meanwhile."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Found = TypeVar("Found")


class Scribe:
    """One thread, for this alone: whoever waits for it holds a lock, and must not queue behind files."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "umbel-scribe")

    async def run(self, work: Callable[Given, Found], *args: Given.args, **kwargs: Given.kwargs) -> Found:
        """Do pure work there."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))

    def close(self) -> None:
        self._thread.shutdown()
