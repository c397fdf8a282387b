"""The stored models, layouts and model versions of runs, and which model files may be removed.

A file is named by its hash, so several versions, also of several runs, may share a file. A file is removed some time
after every version that refers to it was deleted. A process that is about to store a file and refer to it claims the
file first. Claimed files are not removed, and a file that is being removed cannot be claimed.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, delete, insert, or_, select, text, union, update
from sqlalchemy.ext.asyncio import AsyncConnection

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.assignment import ModelChange, ModelRef
from umbel.aggregation.run.records import VersionRecord
from umbel.aggregation.run.run_end import KeptVersion, Measurement, NewModel
from umbel.aggregation.run.stopping import Direction
from umbel.aggregation.types import CHANGES_MAX, ClientId, RunId
from umbel.server.store import tables
from umbel.server.store.database import Database
from umbel.server.store.tables import table_of

_VERSION, _MODEL = table_of(tables.ModelVersionRow), table_of(tables.ModelRow)
_LAYOUT = table_of(tables.LayoutRow)
_RUN, _ROUND = table_of(tables.RunRow), table_of(tables.RoundRow)
_ASSIGNMENT = table_of(tables.AssignmentRow)
_CLAIM, _REMOVAL = table_of(tables.ModelClaimRow), table_of(tables.ModelRemovalRow)
_CLAIMS_LOCK = 0x636C61696D  # "claim": serializes claims and removals
_WITH_SIZE = select(_VERSION, _MODEL.c.size_bytes).join(_MODEL, _MODEL.c.sha256 == _VERSION.c.sha256)


class BeingRemoved(Exception):
    """The file is being removed at this moment; retry in a second."""


def creator_of(run: RunId, model_sha256: str) -> str:
    """The owner of the claims of a run that is being created from this model."""
    return f"create.{run}.{model_sha256[:16]}"


class VersionStore:
    """The rows of model versions, claims and removals."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def versions(self, run: RunId, after: int, limit: int) -> tuple[VersionRecord, ...]:
        """The versions of a run after version `after`, in order."""
        query = _WITH_SIZE.where(_VERSION.c.run == run, _VERSION.c.version > after)
        async with self._db.reading() as tx:
            rows = (await tx.execute(query.order_by(_VERSION.c.version).limit(limit))).all()
        return tuple(_version(row).record for row in rows)

    async def master_sha256(self, run: RunId, version: int) -> str | None:
        """The hash of a version's full-precision copy; None if there is no such version."""
        mine = (_VERSION.c.run == run, _VERSION.c.version == version)
        async with self._db.reading() as tx:
            return await tx.scalar(select(_VERSION.c.master_sha256).where(*mine))

    async def change_bytes(self, sha256: str) -> int | None:
        """The length of a change by its hash; None if no kept version has it."""
        mine = (_VERSION.c.change_sha256 == sha256, _VERSION.c.deleted_at.is_(None))
        async with self._db.reading() as tx:
            return await tx.scalar(select(_VERSION.c.change_bytes).where(*mine).limit(1))

    async def runs_with(self, client: ClientId, sha256: str) -> tuple[RunId, ...]:
        """The runs in which this client had an assignment, and that have this file as a version or as a change."""
        has_file = or_(_VERSION.c.sha256 == sha256, _VERSION.c.change_sha256 == sha256)
        assigned = select(_ASSIGNMENT.c.id).join(_ROUND, _ROUND.c.id == _ASSIGNMENT.c.round_id)
        is_assigned = assigned.where(_ASSIGNMENT.c.client == client, _ROUND.c.run == _VERSION.c.run).exists()
        async with self._db.reading() as tx:
            names = await tx.scalars(select(_VERSION.c.run).where(has_file, is_assigned).distinct())
            return tuple(RunId(name) for name in names)

    async def best(self, run: RunId, mode: Direction) -> int | None:
        """The earliest version with the best value of the early-stopping metric; None if no version has a value."""
        value = _VERSION.c.judged if mode is Direction.MIN else -_VERSION.c.judged
        query = select(_VERSION.c.version).where(_VERSION.c.run == run, _VERSION.c.judged.is_not(None))
        async with self._db.reading() as tx:
            return (await tx.scalars(query.order_by(value, _VERSION.c.version).limit(1))).first()

    async def claim(self, owner: str, sha256s: Collection[str]) -> None:
        """Protect these files from removal until `release`. Raises `BeingRemoved`."""
        async with self._db.writing("claim_models") as tx:
            await self._lock(tx)
            if (await tx.execute(select(_REMOVAL).where(_REMOVAL.c.sha256.in_(sha256s)).limit(1))).first():
                raise BeingRemoved("a model file with the same content is being removed at this moment")
            await release(tx, owner)
            await tx.execute(insert(_CLAIM), [{"owner": owner, "sha256": sha256} for sha256 in sorted(set(sha256s))])

    async def release(self, owner: str) -> None:
        async with self._db.writing("release_models") as tx:
            await release(tx, owner)

    async def begin_removal(self, deleted_before: float) -> tuple[str, ...]:
        """The files whose versions were all deleted before `deleted_before`. From now on they cannot be claimed."""
        async with self._db.writing("begin_removal") as tx:
            await self._lock(tx)
            is_old = _VERSION.c.deleted_at <= deleted_before
            is_kept = or_(_VERSION.c.deleted_at.is_(None), _VERSION.c.deleted_at > deleted_before)
            kept = union(*_names(is_kept), select(_CLAIM.c.sha256), select(_REMOVAL.c.sha256))
            old = union(*_names(is_old & _VERSION.c.removed_at.is_(None))).subquery()
            found = await tx.scalars(select(old.c.sha256).where(old.c.sha256.not_in(kept)))
            rows = [{"sha256": sha256} for sha256 in sorted(found)]
            if rows:
                await tx.execute(insert(_REMOVAL), rows)
            return tuple((await tx.scalars(select(_REMOVAL.c.sha256).order_by(_REMOVAL.c.sha256))).all())

    async def end_removal(self, sha256s: Sequence[str], now: float) -> None:
        """Record that these files were removed, and mark their deleted versions as removed.

        A version may have lost only its master copy or its change. It is marked too, because another version keeps
        its published file; unless only a claim keeps that file.
        """
        is_claimed = _VERSION.c.sha256.in_(select(_CLAIM.c.sha256))
        lost_part = _VERSION.c.master_sha256.in_(sha256s) | _VERSION.c.change_sha256.in_(sha256s)
        gone = _VERSION.c.sha256.in_(sha256s) | (lost_part & ~is_claimed)
        async with self._db.writing("end_removal") as tx:
            await tx.execute(update(_VERSION).where(gone, _VERSION.c.deleted_at.is_not(None)).values(removed_at=now))
            await tx.execute(delete(_REMOVAL).where(_REMOVAL.c.sha256.in_(sha256s)))

    async def _lock(self, tx: AsyncConnection) -> None:
        if not self._db.is_sqlite:  # which has one writer at a time
            await tx.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _CLAIMS_LOCK})


# --- within an open transaction ---------------------------------------------------------------------------------------


async def versions_of(tx: AsyncConnection, run: RunId) -> tuple[KeptVersion, ...]:
    """Every version of a run, in order."""
    rows = await tx.execute(_WITH_SIZE.where(_VERSION.c.run == run).order_by(_VERSION.c.version))
    return tuple(_version(row) for row in rows)


async def changes_of(tx: AsyncConnection, run: RunId) -> tuple[ModelChange, ...]:
    """The changes that lead to a run's newest version, oldest first.

    They are consecutive, at most `CHANGES_MAX`, and together smaller than the model.
    """
    query = _WITH_SIZE.where(_VERSION.c.run == run).order_by(_VERSION.c.version.desc()).limit(CHANGES_MAX)
    found, n_left = list[ModelChange](), 0
    for row in await tx.execute(query):
        n_left = n_left if found else row.size_bytes
        if row.change_sha256 is None or row.deleted_at is not None or row.change_bytes >= n_left:
            break
        found.append(ModelChange(row.parent_sha256, row.change_sha256, row.change_bytes))
        n_left -= row.change_bytes
    return tuple(reversed(found))


async def is_in_newest(tx: AsyncConnection, run: RunId, round_number: int) -> bool:
    """Whether a run's newest version is a successor of the one that this round made, or that one itself."""
    numbers = select(_VERSION.c.version).where(_VERSION.c.run == run)
    made = await tx.scalar(numbers.where(_VERSION.c.round == round_number))
    if made is None:
        return False
    later = select(_VERSION.c.version, _VERSION.c.rolled_back_to).where(_VERSION.c.run == run)
    later = later.where(_VERSION.c.version > made, _VERSION.c.rolled_back_to.is_not(None))
    successor: int | None = None  # the newest version, or one before it that it descends from
    for row in await tx.execute(later.order_by(_VERSION.c.version.desc())):
        if successor is None or row.version <= successor:
            successor = row.rolled_back_to
    return successor is None or successor >= made


async def release(tx: AsyncConnection, owner: str) -> None:
    """Delete the claims of an owner."""
    await tx.execute(delete(_CLAIM).where(_CLAIM.c.owner == owner))


async def add_first_version(tx: AsyncConnection, run: RunId, model: ModelRef, master_sha256: str, now: float) -> None:
    """Version 0: the model that a run is created with."""
    first = NewModel(model, master_sha256, None, reason="the model that the run was created with")
    await tx.execute(insert(_VERSION).values(_columns(run, first, now)))


async def runs_trained_from(tx: AsyncConnection, sha256: str) -> Sequence[Row[Any, Any]]:
    """The name and `run_file` of each run that has made a model from this one, or is under way and may make one now.

    No other transaction can create a run from this model until this one ends.
    """
    await tx.execute(select(_MODEL.c.sha256).where(_MODEL.c.sha256 == sha256).with_for_update())
    is_over = _RUN.c.status.in_([one.value for one in RunStatus if one.is_over])
    later = _VERSION.alias()
    same_run = later.c.run == _VERSION.c.run
    has_later = select(later.c.version).where(same_run, later.c.version > _VERSION.c.version).exists()
    made = select(later.c.version).where(same_run, later.c.parent_sha256 == sha256, later.c.round.is_not(None)).exists()
    trains_it = or_(made, ~has_later & ~is_over)
    query = select(_RUN.c.name, _RUN.c.run_file).join(_VERSION, _VERSION.c.run == _RUN.c.name).distinct()
    return (await tx.execute(query.where(_VERSION.c.sha256 == sha256, trains_it).order_by(_RUN.c.name))).all()


async def add_version(tx: AsyncConnection, run: RunId, new: NewModel, now: float) -> None:
    """The next version, and its model unless it is stored."""
    if await _model(tx, new.ref.sha256) is None:
        await _add_model(tx, new.ref, now)
    await tx.execute(insert(_VERSION).values(_columns(run, new, now)))


async def note_measurement(tx: AsyncConnection, run: RunId, measured: Measurement) -> None:
    """Store what an evaluation measured of a version."""
    mine = (_VERSION.c.run == run, _VERSION.c.version == measured.version)
    columns: dict[str, Any] = {"evaluation": json.dumps(dict(measured.means))}
    if measured.judged is not None:
        columns["judged"] = measured.judged
    await tx.execute(update(_VERSION).where(*mine).values(columns))


async def mark_deleted(tx: AsyncConnection, run: RunId, versions: Collection[int], now: float) -> None:
    """Mark versions as deleted. Their files are removed later."""
    mine = (_VERSION.c.run == run, _VERSION.c.version.in_(versions))
    await tx.execute(update(_VERSION).where(*mine).values(deleted_at=now))


def _columns(run: RunId, new: NewModel, now: float) -> dict[str, Any]:
    return {
        "run": run,
        "version": new.ref.version,
        "sha256": new.ref.sha256,
        "master_sha256": new.master_sha256,
        "parent_sha256": new.parent_sha256,
        "change_sha256": None if new.change is None else new.change.sha256,
        "change_bytes": None if new.change is None else new.change.size_bytes,
        "created_at": now,
        "round": new.round,
        "rolled_back_to": new.rolled_back_to,
        "reason": new.reason,
        "sample_count": new.sample_count,
        "metrics": json.dumps(dict(new.metrics)),
        "evaluation": "{}",
        "judged": new.judged,
    }


def _version(row: Row[Any]) -> KeptVersion:
    record = VersionRecord(
        version=row.version,
        sha256=row.sha256,
        size_bytes=row.size_bytes,
        created_at=row.created_at,
        parent_sha256=row.parent_sha256,
        round=row.round,
        rolled_back_to=row.rolled_back_to,
        reason=row.reason,
        sample_count=row.sample_count,
        metrics=json.loads(row.metrics),
        evaluation=json.loads(row.evaluation),
        judged=row.judged,
        deleted_at=row.deleted_at,
        master_sha256=row.master_sha256,
    )
    return KeptVersion(record, row.master_sha256)


def _names(which: ColumnElement[bool]) -> Iterator[Select[tuple[str]]]:
    """Queries for the files of some versions: published files, master copies and changes."""
    for column in (_VERSION.c.sha256, _VERSION.c.master_sha256, _VERSION.c.change_sha256):
        yield select(column.label("sha256")).where(which, column.is_not(None))


class ModelStore:
    """The rows of models and layouts."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def add_model(self, ref: ModelRef, layout: Layout, now: float) -> None:
        """Add an uploaded model unless it is stored."""
        async with self._db.writing("add_model") as tx:
            if await _model(tx, ref.sha256) is not None:
                return
            if await _layout(tx, layout.digest) is None:
                await tx.execute(insert(_LAYOUT).values(digest=layout.digest, text=layout.to_json()))
            await _add_model(tx, ref, now)

    async def model(self, sha256: str) -> ModelRef | None:
        """A model by its hash. Its version is 0, because a file is not bound to a run."""
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
    return await tx.scalar(select(_LAYOUT.c.text).where(_LAYOUT.c.digest == digest))


async def _add_model(tx: AsyncConnection, ref: ModelRef, now: float) -> None:
    row = {
        "sha256": ref.sha256,
        "size_bytes": ref.size_bytes,
        "layout_digest": ref.layout_digest,
        "created_at": now,
    }
    await tx.execute(insert(_MODEL).values(row))
