"""Checks that a coordinator's blob store and keys belong to its database.

Replicas with different blob stores would lose each other's updates. With different audit keys, they would sign one
chain of audits with two keys. So the first coordinator of a database stores what all of them must share, and each
checks it before it opens its port.

A mark identifies the blob store: a small blob with a random name. The mark is put before the database stores its name.
If several coordinators of one blob store start at once, all find the mark that the database has stored. Another blob
store does not have it, nor does one that was emptied or is older than the database. Then the mark is put again as a
claim, because two databases over one blob store would delete each other's blobs.

The admin key may be replaced by restarting the coordinators one by one, so a different one is only a warning.
"""

import asyncio
import logging
import secrets
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.phrases import counted
from umbel.server.blobs.blobs import BlobStore, model_key
from umbel.server.store import tables
from umbel.server.store.database import Database
from umbel.server.store.keys import AdminKey
from umbel.server.store.tables import table_of

_log = logging.getLogger(__name__)
_DEPLOYMENT, _ID = table_of(tables.DeploymentRow), 1
_RUN, _VERSION = table_of(tables.RunRow), table_of(tables.ModelVersionRow)
_OPEN = (RunStatus.RUNNING.value, RunStatus.PAUSED.value)
_MARKS, _CLAIMS = "deployment/marks", "deployment/claims"
_IF_INTENDED = "If the change is intended, stop every coordinator of this database and start one with --adopt"


class UnfitDeployment(Exception):
    """This coordinator's blob store or keys do not belong to the database. The text says what to do."""


@dataclass(frozen=True, slots=True)
class DeploymentPlaces:
    """Where a coordinator's blobs and keys are, in words for messages."""

    blobs: str
    audit_key: str
    admin_key: str


@dataclass(frozen=True, slots=True)
class Deployment:
    """A database, and the blob store and keys of a coordinator."""

    database: Database
    blobs: BlobStore
    audit_key: str  # public, base64
    admin_key: AdminKey
    named: DeploymentPlaces

    async def settle(self, *, adopt: bool = False) -> None:
        """Check that the blob store and keys belong to the database, or store them if it has none.

        `adopt`: replace what the database has. The tables must exist, and the blob store must be prepared. Raises
        `UnfitDeployment`.
        """
        known = await self._known() or await self._begin(adopt)
        if adopt:
            known = await self._adopt(known)
        if not await self._has_mark(known.store):
            raise UnfitDeployment(await self._wrong_store())
        if known.audit_key != self.audit_key:
            raise UnfitDeployment(
                f"the audit key in {self.named.audit_key} is {self.audit_key}, but the coordinators of this database "
                f"sign with {known.audit_key}. Give all of them the same key file (audit_key_file), or restore a lost "
                f"key file from the backup. {_IF_INTENDED}"
            )
        await self._claim(known.store)
        await self._compare_admin_key(known)
        await self._log_lost_models()

    async def _known(self) -> Row[Any] | None:
        async with self.database.reading() as tx:
            return (await tx.execute(select(_DEPLOYMENT))).one_or_none()

    async def _begin(self, adopt: bool) -> Row[Any]:
        """Store this coordinator's blob store and keys unless another was faster; returns the stored row."""
        if not adopt and await self._claims() and await self._known() is None:
            raise UnfitDeployment(self._taken_store())
        mark = await self._new_mark()
        try:
            async with self.database.writing("begin_deployment") as tx:
                await tx.execute(insert(_DEPLOYMENT).values(id=_ID, **self._columns(mark)))
        except IntegrityError:
            await asyncio.to_thread(self.blobs.delete, [f"{_MARKS}/{mark}"])
        known = await self._known()
        assert known is not None, "nobody removes the row"
        return known

    async def _adopt(self, known: Row[Any]) -> Row[Any]:
        """Replace the database's blob store and keys by this coordinator's; returns the new row."""
        mark = known.store if await self._has_mark(known.store) else await self._new_mark()
        async with self.database.writing("adopt_deployment") as tx:
            await tx.execute(update(_DEPLOYMENT).values(self._columns(mark)))
        others = [f"{_CLAIMS}/{claim}" for claim in await self._claims() if claim != mark]
        await asyncio.to_thread(self.blobs.delete, others)
        adopted = await self._known()
        assert adopted is not None, "nobody removes the row"
        return adopted

    def _columns(self, mark: str) -> dict[str, str]:
        return {"store": mark, "audit_key": self.audit_key, "admin_key": self.admin_key.fingerprint(mark)}

    async def _claim(self, mark: str) -> None:
        """Claim the blob store for this database. If two databases do so at once, at least one sees the other."""
        claims = await self._claims()
        if mark not in claims:
            await self._put(f"{_CLAIMS}/{mark}")
            claims = await self._claims()
        if claims != {mark}:
            raise UnfitDeployment(self._taken_store())

    async def _compare_admin_key(self, known: Row[Any]) -> None:
        """Warn if the admin key is new, and store its fingerprint."""
        mine = self.admin_key.fingerprint(known.store)
        if mine == known.admin_key:
            return
        _log.warning(
            "the admin key in %s is not the one that a coordinator of this database used last. If it is the new key, "
            "give it to the other coordinators and restart them; until then they refuse operators that use it. If it "
            "is the old key, put the new one there and restart this coordinator",
            self.named.admin_key,
        )
        async with self.database.writing("note_admin_key") as tx:
            await tx.execute(update(_DEPLOYMENT).values(admin_key=mine))

    async def _log_lost_models(self) -> None:
        """Log the runs whose newest model is missing. The coordinator starts all the same, for the other runs."""
        async with self.database.reading() as tx:
            number = func.max(_VERSION.c.version).label("version")
            newest = select(_VERSION.c.run, number).group_by(_VERSION.c.run).subquery()
            models = (
                select(_RUN.c.name, _VERSION.c.sha256, _VERSION.c.master_sha256)
                .join(newest, newest.c.run == _RUN.c.name)
                .join(_VERSION, (_VERSION.c.run == newest.c.run) & (_VERSION.c.version == newest.c.version))
                .where(_RUN.c.status.in_(_OPEN))
            )
            rows = (await tx.execute(models)).all()
        for run, *files in rows:
            if None in [await asyncio.to_thread(self.blobs.size, model_key(sha256)) for sha256 in files]:
                _log.error(
                    "run %s cannot continue: its newest model is not in %s; restore a backup of the blobs that is not "
                    "older than the database",
                    run,
                    self.named.blobs,
                )

    async def _new_mark(self) -> str:
        """Put a new mark into the blob store, durably, and return it."""
        mark = secrets.token_hex(16)
        await self._put(f"{_MARKS}/{mark}")
        return mark

    async def _put(self, key: str) -> None:
        def put() -> None:
            with self.blobs.scratch() as path:
                path.write_text("This store is an umbel coordinator's: see docs/how-to/back-up-and-restore.md.\n")
                self.blobs.put(path, key)

        await asyncio.to_thread(put)

    async def _has_mark(self, mark: str) -> bool:
        return await asyncio.to_thread(self.blobs.size, f"{_MARKS}/{mark}") is not None

    async def _claims(self) -> set[str]:
        keys = await asyncio.to_thread(lambda: list(self.blobs.keys(_CLAIMS)))
        return {key.rpartition("/")[2] for key in keys}

    async def _wrong_store(self) -> str:
        async with self.database.reading() as tx:
            n_runs = (await tx.execute(select(func.count()).select_from(tables.RunRow))).scalar_one()
        runs = counted(n_runs, "run")
        return (
            f"the blobs in {self.named.blobs} do not belong to this database, which has {runs}. All coordinators of a "
            "database share one blob store, so check the setting `blobs`. If the store was emptied, restore the backup "
            f"of the blobs that belongs to the database. {_IF_INTENDED}"
        )

    def _taken_store(self) -> str:
        return (
            f"the blobs in {self.named.blobs} belong to another database, and the coordinators of the two would delete "
            "each other's updates. Check the settings `database_url` and `blobs`, and give each database its own "
            f"directory or prefix. {_IF_INTENDED}"
        )
