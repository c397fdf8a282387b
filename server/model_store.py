"""The models that the coordinator has files of, and their layouts.

`round_store.py` has runs and rounds, `upload_store.py` updates, `registry.py` clients. Portable SQL only.
"""

from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncSession

from umbel.aggregation.layout import Layout
from umbel.aggregation.types import ModelRef
from umbel.server import tables
from umbel.server.database import Database


class ModelStore:
    """The rows of models and layouts."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def add_model(self, ref: ModelRef, layout: Layout, now: float) -> None:
        """Remember an uploaded model; again is the same."""
        async with self._db.writing("add_model") as tx:
            if await tx.get(tables.Model, ref.sha256) is not None:
                return
            if await tx.get(tables.LayoutText, layout.digest) is None:
                await tx.execute(insert(tables.LayoutText).values(digest=layout.digest, text=layout.to_json()))
            await _add_model(tx, ref, now)

    async def model(self, sha256: str) -> ModelRef | None:
        """A model by its hash, with version 0: a file is not bound to a run."""
        async with self._db.reading() as tx:
            row = await tx.get(tables.Model, sha256)
        return None if row is None else ModelRef(0, row.sha256, row.size_bytes, row.layout_digest)

    async def layout(self, digest: str) -> Layout | None:
        async with self._db.reading() as tx:
            row = await tx.get(tables.LayoutText, digest)
        return None if row is None else Layout.from_json(row.text)


async def _add_model(tx: AsyncSession, ref: ModelRef, now: float) -> None:
    row = {
        "sha256": ref.sha256,
        "size_bytes": ref.size_bytes,
        "layout_digest": ref.layout_digest,
        "created_at": now,
    }
    await tx.execute(insert(tables.Model).values(row))
