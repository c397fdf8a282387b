"""Whether a coordinator goes with the database that it is given: the same blob store, the same keys.

Replicas that do not share them would lose each other's updates, or sign one chain of audits with two keys, and nothing
else would tell. So the first coordinator over a database writes down what all of them must share, and each looks
before it opens its port.

The store is known by a mark, a small blob with a random name. A new one is put before the database names it, so of
coordinators that start at once over one store all find the mark that has won, and one over another store does not. A
store that was emptied, or that is of a time before this database, does not bear it either. Once the database names a
mark it is put again as a claim: a second database over the same store would sweep away what the first one has there.

The admin key may be exchanged by restarting one coordinator after the other, so another one only makes a warning.
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
from umbel.server.keys import AdminKey
from umbel.server.store import tables
from umbel.server.store.database import Database
from umbel.server.store.tables import table_of

_log = logging.getLogger(__name__)
_DEPLOYMENT, _ID = table_of(tables.DeploymentRow), 1
_RUN, _VERSION = table_of(tables.RunRow), table_of(tables.ModelVersionRow)
_OPEN = (RunStatus.RUNNING.value, RunStatus.PAUSED.value)
_MARKS, _CLAIMS = "deployment/marks", "deployment/claims"
_IF_MEANT = "if the change is meant, stop every coordinator of this database and start one of them with --adopt"


class UnfitDeployment(Exception):
    """This coordinator may not work on this database as it is set up. One sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class DeploymentPlaces:
    """Where a coordinator has things from, as its operator knows the places."""

    blobs: str
    audit_key: str
    admin_key: str


@dataclass(frozen=True, slots=True)
class Deployment:
    """A database, and what a coordinator brings to it. `audit_key`: the public one; `named`: its settings, in words."""

    database: Database
    blobs: BlobStore
    audit_key: str
    admin_key: AdminKey
    named: DeploymentPlaces

    async def settle(self, *, adopt: bool = False) -> None:
        """See that all goes together, or write it down if nobody has. `adopt`: what is brought is right from now on.

        The tables must be there, and the store prepared. Raises `UnfitDeployment`.
        """
        known = await self._known() or await self._begin(adopt)
        if adopt:
            known = await self._adopt(known)
        if not await self._bears(known.store):
            raise UnfitDeployment(await self._not_its_store())
        if known.audit_key != self.audit_key:
            raise UnfitDeployment(self._not_its_audit_key(known.audit_key))
        await self._claim(known.store)
        await self._compare_admin_key(known)
        await self._tell_of_lost_models()

    async def _known(self) -> Row[Any] | None:
        async with self.database.reading() as tx:
            return (await tx.execute(select(_DEPLOYMENT))).one_or_none()

    async def _begin(self, adopt: bool) -> Row[Any]:
        """Write down what this coordinator brings, unless another one is quicker; what is written down then."""
        if not adopt and await self._claims() and await self._known() is None:
            raise UnfitDeployment(self._taken_store())
        mark = await self._mark()
        try:
            async with self.database.writing("begin_deployment") as tx:
                await tx.execute(insert(_DEPLOYMENT).values(id=_ID, **self._brought(mark)))
        except IntegrityError:
            await asyncio.to_thread(self.blobs.delete, [f"{_MARKS}/{mark}"])
        known = await self._known()
        assert known is not None, "nobody removes the row"
        return known

    async def _adopt(self, known: Row[Any]) -> Row[Any]:
        """Make what this coordinator brings that of the database."""
        mark = known.store if await self._bears(known.store) else await self._mark()
        async with self.database.writing("adopt_deployment") as tx:
            await tx.execute(update(_DEPLOYMENT).values(self._brought(mark)))
        others = [f"{_CLAIMS}/{claim}" for claim in await self._claims() if claim != mark]
        await asyncio.to_thread(self.blobs.delete, others)
        adopted = await self._known()
        assert adopted is not None, "nobody removes the row"
        return adopted

    def _brought(self, mark: str) -> dict[str, str]:
        return {"store": mark, "audit_key": self.audit_key, "admin_key": self.admin_key.fingerprint(mark)}

    async def _claim(self, mark: str) -> None:
        """Claim the store for this database. Of two that do so at once, one sees the other, or both do."""
        claims = await self._claims()
        if mark not in claims:
            await self._put(f"{_CLAIMS}/{mark}")
            claims = await self._claims()
        if claims != {mark}:
            raise UnfitDeployment(self._taken_store())

    async def _compare_admin_key(self, known: Row[Any]) -> None:
        """Warn of a key that is not the last one's, and note it."""
        mine = self.admin_key.fingerprint(known.store)
        if mine == known.admin_key:
            return
        _log.warning(
            "the admin key in %s is not the one with which a coordinator of this database started last; if it is new, "
            "give it to the others and restart them, else operators are refused at some of them",
            self.named.admin_key,
        )
        async with self.database.writing("note_admin_key") as tx:
            await tx.execute(update(_DEPLOYMENT).values(admin_key=mine))

    async def _tell_of_lost_models(self) -> None:
        """Say which runs cannot go on. The others can: a model that is missing stops no coordinator."""
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
                    "run %s cannot continue: its newest model is not in %s; restore blobs that are not older than the "
                    "database",
                    run,
                    self.named.blobs,
                )

    async def _mark(self) -> str:
        """Mark the store, durably; the mark."""
        mark = secrets.token_hex(16)
        await self._put(f"{_MARKS}/{mark}")
        return mark

    async def _put(self, key: str) -> None:
        def put() -> None:
            with self.blobs.scratch() as path:
                path.write_text("This store is an umbel coordinator's: see docs/how-to/back-up-and-restore.md.\n")
                self.blobs.put(path, key)

        await asyncio.to_thread(put)

    async def _bears(self, mark: str) -> bool:
        return await asyncio.to_thread(self.blobs.size, f"{_MARKS}/{mark}") is not None

    async def _claims(self) -> set[str]:
        keys = await asyncio.to_thread(lambda: list(self.blobs.keys(_CLAIMS)))
        return {key.rpartition("/")[2] for key in keys}

    async def _not_its_store(self) -> str:
        async with self.database.reading() as tx:
            n_runs = (await tx.execute(select(func.count()).select_from(tables.RunRow))).scalar_one()
        runs = counted(n_runs, "run")
        return (
            f"the blobs in {self.named.blobs} are not those of this database, which holds {runs}: all its "
            "coordinators share one blob store, so check the setting blobs; if the store was emptied, restore the "
            f"backup that goes with the database; {_IF_MEANT}"
        )

    def _taken_store(self) -> str:
        return (
            f"the blobs in {self.named.blobs} are another database's, and two would remove each other's updates: "
            "check the settings database_url and blobs, and take another directory or prefix for another database; "
            f"{_IF_MEANT}"
        )

    def _not_its_audit_key(self, known: str) -> str:
        return (
            f"the audit key in {self.named.audit_key} is {self.audit_key}, but this database's coordinators sign with "
            f"{known}: give all of them the same file (audit_key_file), from the backup if it was lost; {_IF_MEANT}"
        )
