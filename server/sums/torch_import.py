"""Torch, which takes seconds to import: after the coordinator listens, and not by the thread that answers requests."""

import asyncio
import threading
from importlib import import_module

_imported = threading.Event()


def import_torch() -> None:
    """Import torch and all of this room that uses it."""
    import_module("umbel.server.sums.closing")
    _imported.set()


async def torch_imported() -> None:
    """Return when torch is imported. An import statement would block all requests until then, even if another thread
    imports it already."""
    if not _imported.is_set():
        await asyncio.to_thread(import_torch)
