"""The stored runs, rounds, assignments and member lists.

A run is changed under the lock of its row (`LockedRun`), so two replicas never decide on different states.
"""

import json
import secrets
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from pydantic import TypeAdapter
from sqlalchemy import insert, select, union, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from umbel.aggregation.audit.bundle import Sealed, json_sha256
from umbel.aggregation.messages import Outcome, RunStatus
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.plans.round import Task
from umbel.aggregation.round.states import Recruiting, RoundState
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.records import RoundRecord
from umbel.aggregation.trust.members import MemberList, SignedMembers, members_bytes, read_members
from umbel.aggregation.types import AssignmentId, ClientId, RunId
from umbel.server.store import tables
from umbel.server.store.audit_rows import add_bundle, evidence_of
from umbel.server.store.database import Database
from umbel.server.store.locked_run import LockedRun
from umbel.server.store.round_rows import is_committed, state_of
from umbel.server.store.run_rows import (
    WITH_LAST_REQUEST,
    add_round,
    add_traffic,
    assignment_of,
    assignments_of,
    caught_up,
    client_row,
    rows_of,
)
from umbel.server.store.stored import ClientEvidence, LiveRun, PartialSum, StoredAssignment, StoredRecord, Traffic
from umbel.server.store.tables import table_of
from umbel.server.store.uploads import uploads_of
from umbel.server.store.versions import add_first_version, creator_of, is_in_newest, release, runs_trained_from

_RECORD = TypeAdapter(RoundRecord)
_RUN_FILE = TypeAdapter(RunFile)
_RUN, _ROUND, _ASSIGNMENT = table_of(tables.RunRow), table_of(tables.RoundRow), table_of(tables.AssignmentRow)
_UPLOAD, _SEALED = table_of(tables.UploadRow), table_of(tables.SealedSharesRow)
_PARTIAL, _LIST = table_of(tables.PartialSumRow), table_of(tables.MemberListRow)


class MemberListStore:
    """The member lists of runs. A list never changes, because the run file names its hash."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._insert = (sqlite.insert if database.is_sqlite else postgresql.insert)(_LIST).on_conflict_do_nothing()

    async def add(self, run: RunId, signed: SignedMembers) -> None:
        """Add the list of a stored run."""
        async with self._db.writing("add_member_list") as tx:
            await self.write(tx, run, signed)

    async def write(self, tx: AsyncConnection, run: RunId, signed: SignedMembers) -> None:
        """Add a list within an open transaction."""
        await tx.execute(self._insert, [{"run": run, "text": members_bytes(signed).decode()}])

    async def of(self, run: RunId) -> MemberList | None:
        """The list of a run; None if none was given."""
        async with self._db.reading() as tx:
            text = await tx.scalar(select(_LIST.c.text).where(_LIST.c.run == run))
        return None if text is None else read_members(text.encode()).list


class FirstModelTrained(Exception):
    """Another secure run has trained the first model, or trains it now. `run`: its name."""

    def __init__(self, run: RunId) -> None:
        super().__init__(f"the secure run {run!r} trains this first model too")
        self.run = run


class RoundStore:
    """The rows of runs, rounds and assignments. `replica`: the name of this process among the coordinators."""

    def __init__(self, database: Database, replica: str, member_lists: MemberListStore) -> None:
        self._db = database
        self._replica = replica
        self._member_lists = member_lists

    # --- runs ---------------------------------------------------------------------------------------------------------

    async def add_run(
        self,
        file: RunFile,
        model: ModelRef,
        master_sha256: str,
        state: Recruiting,
        now: float,
        bundle: Sealed,
        members: SignedMembers | None = None,
        *,
        needs_new_model: bool = False,
    ) -> None:
        """Create a run with version 0 of its model, its first round, audit bundle and member list.

        Raises `FirstModelTrained` if it `needs_new_model` and another secure run trains its model.
        """
        async with self._db.writing("add_run") as tx:
            if needs_new_model:
                await _require_new(tx, RunId(file.name), model)
            run = {
                "name": file.name,
                "run_file": _RUN_FILE.dump_json(file).decode(),
                "model_sha256": model.sha256,
                "status": RunStatus.RUNNING.value,
                "reason": "",
                "created_at": now,
                "salt": secrets.token_bytes(16),
                "round_id": 0,
                "revision": 1,
                "run_file_sha256": json_sha256(file),
                "audit_number": 0,
                "audit_sha256": bundle.sha256,
            }
            await tx.execute(insert(_RUN).values(run))
            if members is not None:
                await self._member_lists.write(tx, RunId(file.name), members)
            await add_first_version(tx, RunId(file.name), model, master_sha256, now)
            await release(tx, creator_of(RunId(file.name), model.sha256))
            round_id = await add_round(tx, state)
            await tx.execute(update(_RUN).where(_RUN.c.name == file.name).values(round_id=round_id))
            await add_bundle(tx, RunId(file.name), 0, bundle, None, None)

    async def revisions(self) -> Mapping[RunId, int]:
        """The revision of every run, in order of creation."""
        query = select(_RUN.c.name, _RUN.c.revision).order_by(_RUN.c.created_at, _RUN.c.name)
        async with self._db.reading() as tx:
            return {RunId(row.name): row.revision for row in await tx.execute(query)}

    async def load(self, name: RunId) -> LiveRun | None:
        """The stored run; None if there is none."""
        async with self._db.reading() as tx:
            row = (await tx.execute(select(_RUN).where(_RUN.c.name == name))).one_or_none()
            return None if row is None else await caught_up(tx, row, None)

    async def refresh(self, known: LiveRun) -> LiveRun:
        """The stored run; `known` itself if nothing has changed."""
        async with self._db.reading() as tx:
            row = (await tx.execute(select(_RUN).where(_RUN.c.name == known.name))).one()
            return await caught_up(tx, row, known)

    @asynccontextmanager
    async def locked(self, known: LiveRun, job: str = "step") -> AsyncGenerator[LockedRun]:
        """Lock the stored run for a transaction, and save it when the block ends. `job`: the transaction's log name."""
        async with self._db.writing(job) as tx:
            query = select(_RUN).where(_RUN.c.name == known.name).with_for_update()
            found = await caught_up(tx, (await tx.execute(query)).one(), known)
            run = LockedRun(tx, found, self._replica)
            yield run
            if run.live is not found:
                await run.save_run()

    # --- partial sums -------------------------------------------------------------------------------------------------

    async def adopt(self, known: LiveRun, dead: Collection[str]) -> LiveRun:
        """Take over the updates that dead replicas were to fold, except those in a stored partial sum.

        Takes over nothing if the round has left the phase of `known`, because another replica may then be responsible.
        """
        async with self.locked(known, "adopt") as run:
            if (run.live.round_id, run.live.state.phase) == (known.round_id, known.state.phase):
                await run.adopt(dead)
        return run.live

    async def post_partial_sum(self, known: LiveRun, partial: PartialSum) -> bool:
        """Store this replica's sum for the replica that closes the round; False if the sum may not be stored.

        A client counts once, so the sum must not contain updates that others have adopted. It must contain all of the
        replica's previous sum, because the uploads of that sum are deleted.
        """
        async with self.locked(known, "post_partial_sum") as run:
            return run.live.round_id == known.round_id and await run.put_partial_sum(partial)

    async def sealed_shares(self, round_id: int) -> Mapping[ClientId, bytes]:
        """The ShareKeys messages of a secure round, by sender."""
        query = select(_ASSIGNMENT.c.client, _SEALED.c.body).join(_SEALED, _SEALED.c.assignment == _ASSIGNMENT.c.id)
        async with self._db.reading() as tx:
            rows = (await tx.execute(query.where(_ASSIGNMENT.c.round_id == round_id))).all()
        return {ClientId(row.client): row.body for row in rows}

    async def partial_sums(self, round_id: int) -> tuple[PartialSum, ...]:
        async with self._db.reading() as tx:
            rows = (await tx.execute(select(_PARTIAL).where(_PARTIAL.c.round_id == round_id))).all()
        return tuple(
            PartialSum(row.replica, row.key, row.sha256, tuple(json.loads(row.clients)), row.total_weight)
            for row in rows
        )

    # --- rounds and assignments ---------------------------------------------------------------------------------------

    async def round_state(self, round_id: int) -> RoundState:
        """The state of any attempt."""
        async with self._db.reading() as tx:
            head = (await tx.execute(select(_ROUND.c.head).where(_ROUND.c.id == round_id))).scalar_one()
            return state_of(head, [client_row(row) for row in await rows_of(tx, round_id, 0)])

    async def open_names(self) -> tuple[frozenset[str], frozenset[str]]:
        """The assignments whose updates are needed, and the ids of attempts whose partial sums are needed.

        An update is needed while its attempt is open, or while its row is kept for a replay.
        """
        is_open = _ROUND.c.record.is_(None)
        assignments = select(_ASSIGNMENT.c.id).join(_ROUND, _ROUND.c.id == _ASSIGNMENT.c.round_id).where(is_open)
        async with self._db.reading() as tx:
            names = frozenset((await tx.scalars(union(assignments, select(_UPLOAD.c.assignment)))).all())
            rounds = frozenset(str(one) for one in await tx.scalars(select(_ROUND.c.id).where(is_open)))
        return names, rounds

    async def ended(self, name: RunId, after: int, limit: int) -> tuple[RoundRecord, ...]:
        """The records of ended attempts, oldest first, without the first `after`."""
        query = select(_ROUND.c.record).where(_ROUND.c.run == name, _ROUND.c.record.is_not(None))
        async with self._db.reading() as tx:
            rows = (await tx.scalars(query.order_by(_ROUND.c.id).offset(after).limit(limit))).all()
        return tuple(_RECORD.validate_json(row) for row in rows)

    async def newest_ended(self, name: RunId, count: int, after: int = 0) -> tuple[StoredRecord, ...]:
        """The last `count` records of attempts with an id above `after`, oldest first."""
        mine = (_ROUND.c.run == name, _ROUND.c.id > after, _ROUND.c.record.is_not(None))
        query = select(_ROUND.c.id, _ROUND.c.record).where(*mine).order_by(_ROUND.c.id.desc()).limit(count)
        async with self._db.reading() as tx:
            rows = (await tx.execute(query)).all()
        return tuple(StoredRecord(row.id, _RECORD.validate_json(row.record)) for row in reversed(rows))

    async def assignments(self, round_id: int) -> tuple[StoredAssignment, ...]:
        """Every client of an attempt."""
        async with self._db.reading() as tx:
            return await assignments_of(tx, round_id)

    async def clients_of(self, round_id: int) -> tuple[tuple[StoredAssignment, ...], Mapping[ClientId, ClientEvidence]]:
        """Every client of an open attempt, and the evidence of it."""
        async with self._db.reading() as tx:
            return await assignments_of(tx, round_id), await evidence_of(tx, round_id)

    async def assignment(self, assignment: AssignmentId) -> StoredAssignment | None:
        """One assignment with its upload; None if there is none."""
        async with self._db.reading() as tx:
            row = (await tx.execute(WITH_LAST_REQUEST.where(_ASSIGNMENT.c.id == assignment))).one_or_none()
            if row is None:
                return None
            uploads = await uploads_of(tx, [assignment])
        return replace(assignment_of(row), upload=uploads.get(assignment))

    async def counts(self, assignment: AssignmentId) -> bool:
        """Whether the run's newest model has the work of this assignment in it: its attempt has made a version, of
        which the newest one is a successor. A rollback is a successor of the version that it copied.
        """
        of_round = (_ROUND.c.run, _ROUND.c.task, _ROUND.c.number, _ROUND.c.head)
        mine = select(*of_round, _ASSIGNMENT.c.outcome, _ASSIGNMENT.c.missing).join_from(_ASSIGNMENT, _ROUND)
        async with self._db.reading() as tx:
            row = (await tx.execute(mine.where(_ASSIGNMENT.c.id == assignment))).one_or_none()
            if row is None or row.outcome != Outcome.ACCEPTED or row.missing is not None:
                return False
            if not is_committed(row.head) or not Task(row.task).makes_model:
                return False
            return await is_in_newest(tx, RunId(row.run), row.number)

    async def add_traffic(self, name: RunId, traffic: Traffic) -> None:
        """Add to the bytes of assignments, under the run's lock because it writes many rows."""
        if not traffic.assignments:
            return
        async with self._db.writing("add_traffic") as tx:
            await tx.execute(select(_RUN.c.name).where(_RUN.c.name == name).with_for_update())
            await add_traffic(tx, traffic)


async def _require_new(tx: AsyncConnection, name: RunId, model: ModelRef) -> None:
    """Raise `FirstModelTrained` if another secure run trains this model."""
    for row in await runs_trained_from(tx, model.sha256):
        if row.name != name and _RUN_FILE.validate_json(row.run_file).secure:
            raise FirstModelTrained(RunId(row.name))
