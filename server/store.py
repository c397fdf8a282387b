"""What the coordinator remembers of runs, rounds and uploads: every query on them, in named short transactions.

`Registry` (registry.py) does the same for clients and tokens. Portable SQL only.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from pydantic import Discriminator, TypeAdapter
from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from umbel.aggregation.layout import Layout
from umbel.aggregation.messages import Outcome, ReportAnswer, RunStatus
from umbel.aggregation.records import RoundRecord
from umbel.aggregation.round import Recruiting, RoundState
from umbel.aggregation.runfile import RunFile
from umbel.aggregation.types import AssignmentId, ClientId, ModelRef, RunId, WorkDone
from umbel.server import tables
from umbel.server.database import Database
from umbel.server.stored import (
    Answered,
    NewModel,
    RoundEnd,
    StoredAssignment,
    StoredRound,
    StoredRun,
    StoredUpload,
    Traffic,
)

_STATE: TypeAdapter[RoundState] = TypeAdapter(Annotated[RoundState, Discriminator("phase")])
_RECORD = TypeAdapter(RoundRecord)
_RUN_FILE = TypeAdapter(RunFile)
_WORK = TypeAdapter(WorkDone)


class StaleRound(Exception):
    """Another writer has saved this round since it was loaded: load it again."""


class Store:
    """Runs, models, rounds, assignments and uploads."""

    def __init__(self, database: Database) -> None:
        self._db = database

    # --- models and runs ----------------------------------------------------------------------------------------------

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

    async def add_run(self, file: RunFile, model: ModelRef, master_sha256: str, state: Recruiting, now: float) -> None:
        """Create a run with version 0 of its model and its first round."""
        async with self._db.writing("add_run") as tx:
            run = {
                "name": file.name,
                "run_file": _RUN_FILE.dump_json(file).decode(),
                "model_sha256": model.sha256,
                "status": RunStatus.RUNNING.value,
                "reason": "",
                "created_at": now,
            }
            await tx.execute(insert(tables.Run).values(run))
            version = {"run": file.name, "version": 0, "sha256": model.sha256, "master_sha256": master_sha256}
            await tx.execute(insert(tables.ModelVersion).values(version))
            await _add_round(tx, state)

    async def run_names(self) -> Sequence[str]:
        async with self._db.reading() as tx:
            return (await tx.scalars(select(tables.Run.name).order_by(tables.Run.created_at))).all()

    async def run(self, name: RunId) -> StoredRun | None:
        """A run with its newest model."""
        versions = select(tables.ModelVersion).where(tables.ModelVersion.run == name)
        async with self._db.reading() as tx:
            run = await tx.get(tables.Run, name)
            if run is None:
                return None
            version = (await tx.scalars(versions.order_by(tables.ModelVersion.version.desc()).limit(1))).one()
            model = await tx.get_one(tables.Model, version.sha256)
        return StoredRun(
            file=_RUN_FILE.validate_json(run.run_file),
            status=RunStatus(run.status),
            reason=run.reason,
            created_at=run.created_at,
            model=ModelRef(version.version, model.sha256, model.size_bytes, model.layout_digest),
            master_sha256=version.master_sha256,
            first_model_sha256=run.model_sha256,
        )

    async def set_run_status(self, name: RunId, status: RunStatus, reason: str) -> None:
        async with self._db.writing("set_run_status") as tx:
            await tx.execute(
                update(tables.Run).where(tables.Run.name == name).values(status=status.value, reason=reason)
            )

    # --- rounds -------------------------------------------------------------------------------------------------------

    async def newest_round(self, name: RunId) -> StoredRound:
        """The attempt that was begun last."""
        query = select(tables.Round).where(tables.Round.run == name).order_by(tables.Round.id.desc()).limit(1)
        async with self._db.reading() as tx:
            row = (await tx.scalars(query)).one()
        return StoredRound(row.id, row.revision, _STATE.validate_json(row.state))

    async def round_state(self, round_id: int) -> RoundState:
        async with self._db.reading() as tx:
            return _STATE.validate_json((await tx.get_one(tables.Round, round_id)).state)

    async def save_round(
        self,
        stored: StoredRound,
        invited: Sequence[tuple[AssignmentId, ClientId, int]] = (),
        answered: Sequence[Answered] = (),
        declined: Sequence[AssignmentId] = (),
        traffic: Mapping[AssignmentId, Traffic] | None = None,
    ) -> StoredRound:
        """Save a round's next state with what goes with it, at once. Raises `StaleRound`."""
        async with self._db.writing("save_round") as tx:
            await _save_state(tx, stored, None)
            if invited:
                await tx.execute(insert(tables.Assignment), [_assignment_row(stored.id, *one) for one in invited])
            for one in answered:
                await _save_answer(tx, one)
            if declined:
                await tx.execute(
                    update(tables.Assignment).where(tables.Assignment.id.in_(declined)).values(is_declined=True)
                )
            await _add_traffic(tx, traffic or {})
        return StoredRound(stored.id, stored.revision + 1, stored.state)

    async def end_round(
        self, stored: StoredRound, end: RoundEnd, now: float, traffic: Mapping[AssignmentId, Traffic]
    ) -> StoredRound | None:
        """Save how an attempt ended and what comes next, at once. Returns the next attempt. Raises `StaleRound`."""
        run = RunId(end.record.run)
        assignments = select(tables.Assignment.id).where(tables.Assignment.round_id == stored.id)
        async with self._db.writing("end_round") as tx:
            await _save_state(tx, stored, end.record)
            for one in end.answered:
                await _save_answer(tx, one)
            await _add_traffic(tx, traffic)
            await tx.execute(delete(tables.Upload).where(tables.Upload.assignment.in_(assignments)))
            if end.model is not None:
                await _add_version(tx, run, end.model, now)
            begun = None if end.next_state is None else await _add_round(tx, end.next_state)
            status = {"status": end.status.value, "reason": end.reason}
            await tx.execute(update(tables.Run).where(tables.Run.name == run).values(status))
        return begun

    async def ended(self, name: RunId, after: int, limit: int) -> tuple[RoundRecord, ...]:
        """The records of ended attempts from the `after`-th on, oldest first."""
        ended = tables.Round.record.is_not(None)
        query = select(tables.Round.record).where(tables.Round.run == name, ended)
        async with self._db.reading() as tx:
            rows = (await tx.scalars(query.order_by(tables.Round.id).offset(after).limit(limit))).all()
        return tuple(_RECORD.validate_json(row) for row in rows if row is not None)

    # --- assignments and uploads --------------------------------------------------------------------------------------

    async def assignments(self, round_id: int) -> tuple[StoredAssignment, ...]:
        query = select(tables.Assignment).where(tables.Assignment.round_id == round_id)
        uploads = select(tables.Upload).join(tables.Assignment).where(tables.Assignment.round_id == round_id)
        async with self._db.reading() as tx:
            rows = (await tx.scalars(query)).all()
            found = {row.assignment: row for row in (await tx.scalars(uploads)).all()}
        return tuple(_assignment(row, found.get(row.id)) for row in rows)

    async def assignment(self, assignment: AssignmentId) -> tuple[StoredAssignment, int] | None:
        """An assignment and the id of its round."""
        async with self._db.reading() as tx:
            row = await tx.get(tables.Assignment, assignment)
            upload = await tx.get(tables.Upload, assignment)
        return None if row is None else (_assignment(row, upload), row.round_id)

    async def save_upload(self, assignment: AssignmentId, upload: StoredUpload, is_new: bool) -> None:
        """Remember how far an upload has come."""
        columns = {
            "length": upload.length,
            "offset": upload.offset,
            "sha256": upload.sha256,
            "is_complete": upload.is_complete,
        }
        async with self._db.writing("save_upload") as tx:
            if is_new:
                await tx.execute(insert(tables.Upload).values(assignment=assignment, **columns))
            else:
                known = tables.Upload.assignment == assignment
                await tx.execute(update(tables.Upload).where(known).values(columns))

    async def forget_upload(self, assignment: AssignmentId) -> None:
        async with self._db.writing("forget_upload") as tx:
            await tx.execute(delete(tables.Upload).where(tables.Upload.assignment == assignment))

    async def upload_names(self) -> Iterable[str]:
        """The assignments that have an upload."""
        async with self._db.reading() as tx:
            return (await tx.scalars(select(tables.Upload.assignment))).all()


def _assignment(row: tables.Assignment, upload: tables.Upload | None) -> StoredAssignment:
    answer = None if row.outcome is None else ReportAnswer(Outcome(row.outcome), row.reason or "")
    sent = None
    if upload is not None:
        sent = StoredUpload(upload.length, upload.offset, upload.sha256, upload.is_complete)
    return StoredAssignment(
        id=AssignmentId(row.id),
        client=ClientId(row.client),
        sample_count=row.sample_count,
        is_declined=row.is_declined,
        answer=answer,
        reported_at=row.reported_at,
        bytes_up=row.bytes_up,
        bytes_down=row.bytes_down,
        upload=sent,
    )


def _assignment_row(round_id: int, name: AssignmentId, client: ClientId, sample_count: int) -> dict[str, object]:
    return {
        "id": name,
        "round_id": round_id,
        "client": client,
        "sample_count": sample_count,
        "is_declined": False,
        "bytes_up": 0,
        "bytes_down": 0,
    }


async def _changed(tx: AsyncSession, statement: object) -> bool:
    """Whether an update found its row."""
    result = await tx.execute(statement)  # type: ignore[call-overload]
    return bool(result.rowcount)


async def _save_state(tx: AsyncSession, stored: StoredRound, record: RoundRecord | None) -> None:
    table = tables.Round
    values = {
        "state": _STATE.dump_json(stored.state).decode(),
        "revision": stored.revision + 1,
        "record": None if record is None else _RECORD.dump_json(record).decode(),
    }
    expected = update(table).where(table.id == stored.id, table.revision == stored.revision).values(values)
    if not await _changed(tx, expected):
        raise StaleRound(f"round {stored.id} is no longer at revision {stored.revision}")


async def _save_answer(tx: AsyncSession, one: Answered) -> None:
    columns = {
        "outcome": one.answer.outcome.value,
        "reason": one.answer.reason,
        "report": _WORK.dump_json(one.work).decode(),
        "reported_at": one.at,
    }
    await tx.execute(update(tables.Assignment).where(tables.Assignment.id == one.assignment).values(columns))


async def _add_traffic(tx: AsyncSession, traffic: Mapping[AssignmentId, Traffic]) -> None:
    table = tables.Assignment
    for name, bytes_ in traffic.items():
        if bytes_ != Traffic():
            sums = {"bytes_up": table.bytes_up + bytes_.up, "bytes_down": table.bytes_down + bytes_.down}
            await tx.execute(update(table).where(table.id == name).values(sums))


async def _add_round(tx: AsyncSession, state: Recruiting) -> StoredRound:
    plan, text = state.plan, _STATE.dump_json(state).decode()
    row = {"run": plan.run, "number": plan.number, "attempt": plan.attempt, "state": text, "revision": 1}
    round_id = (await tx.scalars(insert(tables.Round).values(row).returning(tables.Round.id))).one()
    return StoredRound(round_id, 1, state)


async def _add_model(tx: AsyncSession, ref: ModelRef, now: float) -> None:
    row = {
        "sha256": ref.sha256,
        "size_bytes": ref.size_bytes,
        "layout_digest": ref.layout_digest,
        "created_at": now,
    }
    await tx.execute(insert(tables.Model).values(row))


async def _add_version(tx: AsyncSession, run: RunId, new: NewModel, now: float) -> None:
    if await tx.get(tables.Model, new.ref.sha256) is None:
        await _add_model(tx, new.ref, now)
    row = {
        "run": run,
        "version": new.ref.version,
        "sha256": new.ref.sha256,
        "master_sha256": new.master_sha256,
        "parent_sha256": new.parent_sha256,
    }
    await tx.execute(insert(tables.ModelVersion).values(row))
