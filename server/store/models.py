"""The models that the coordinator has files of, and their layouts.

`round_store.py` has runs and rounds, `upload_store.py` updates, `registry.py` clients. Portable SQL only.
"""

from typing import Any

from sqlalchemy import Row, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.assignment import ModelRef
from umbel.server.store import tables
from umbel.server.store.database import Database
from umbel.server.store.tables import table_of

_MODEL, _LAYOUT = table_of(tables.Model), table_of(tables.LayoutText)


class ModelStore:
    """The rows of models and layouts."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def add_model(self, ref: ModelRef, layout: Layout, now: float) -> None:
        """Remember an uploaded model; again is the same."""
        async with self._db.writing("add_model") as tx:
            if await _model(tx, ref.sha256) is not None:
                return
            if await _layout(tx, layout.digest) is None:
                await tx.execute(insert(tables.LayoutText).values(digest=layout.digest, text=layout.to_json()))
            await _add_model(tx, ref, now)

    async def model(self, sha256: str) -> ModelRef | None:
        """A model by its hash, with version 0: a file is not bound to a run."""
        async with self._db.reading() as tx:
            row = await _model(tx, sha256)
        return None if row is None else ModelRef(0, row.sha256, row.size_bytes, row.layout_digest)

    async def layout(self, digest: str) -> Layout | None:
        async with self._db.reading() as tx:
            text = await _layout(tx, digest)
        return None if text is None else Layout.from_json(text)


async def _model(tx: AsyncConnection, sha256: str) -> Row[Any] | None:
    return (await tx.execute(select(_MODEL).where(_MODEL.c.sha256 == sha256))).one_or_none()


async def _layout(tx: AsyncConnection, digest: str) -> str | None:
    found = await tx.execute(select(_LAYOUT.c.text).where(_LAYOUT.c.digest == digest))
    return found.scalar_one_or_none()


async def _add_model(tx: AsyncConnection, ref: ModelRef, now: float) -> None:
    row = {
        "sha256": ref.sha256,
        "size_bytes": ref.size_bytes,
        "layout_digest": ref.layout_digest,
        "created_at": now,
    }
    await tx.execute(insert(tables.Model).values(row))
