"""A model on its way in: written and hashed as it comes, a mebibyte at a time, by threads.

The disk may stall under a large file; the requests of devices must not stall with it.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from io import FileIO
from pathlib import Path

from umbel.server.blobs.blobs import Blob

_BATCH_BYTES = 1 << 20


async def write_stream(pieces: AsyncIterator[bytes], path: Path) -> Blob:
    """Write a new file; what came."""
    digest, size_bytes, batch = hashlib.sha256(), 0, bytearray()

    def write(file: FileIO) -> None:
        left = memoryview(batch)
        digest.update(left)
        while left:
            left = left[file.write(left) :]

    with FileIO(path, "x") as file:
        async for piece in pieces:
            batch += piece
            size_bytes += len(piece)
            if len(batch) >= _BATCH_BYTES:
                await asyncio.to_thread(write, file)
                batch = bytearray()
        await asyncio.to_thread(write, file)
    return Blob(digest.hexdigest(), size_bytes)
