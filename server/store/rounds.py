"""Runs under way, as they are stored: read, caught up with, and changed under the lock of the run's row.

`step` is the one way in which a round moves on. In one transaction it locks the run, reads what other replicas have
changed since, lets `Transition.decide` say what happens now, and stores that. Two replicas can therefore never decide
on different states, and what has been answered is what is stored.
"""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from pydantic import TypeAdapter
from sqlalchemy import bindparam, delete, insert, select, union, update
from sqlalchemy.ext.asyncio import AsyncConnection

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.round.states import Abandoned, Closing, Committed, Recruiting, RoundState
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.run.records import RoundRecord
from umbel.aggregation.run.run_end import KeptVersion, RoundEnd
from umbel.aggregation.trust.members import SignedMembers
from umbel.aggregation.types import AssignmentId, ClientId, RunId
from umbel.server.devices.member_lists import MemberListStore
from umbel.server.runs.audit_facts import ClientEvidence, Deposition
from umbel.server.scribe import Scribe
from umbel.server.store import tables
from umbel.server.store.audit_trail import AuditTrail, evidence_of, signed_text
from umbel.server.store.database import Database
from umbel.server.store.replicas import closing_job
from umbel.server.store.round_rows import changed_columns, head_of, state_of
from umbel.server.store.run_rows import (
    WITH_HEARD,
    add_round,
    assignment_of,
    assignments_of,
    caught_up,
    client_row,
    rows_of,
    save_run,
    update_assignments,
)
from umbel.server.store.stored import (
    Change,
    Ended,
    LiveRun,
    PartialSum,
    StoredAssignment,
    StoredRecord,
    StoredRun,
    StoredUpload,
    Traffic,
)
from umbel.server.store.tables import table_of
from umbel.server.store.uploads import uploads_of
from umbel.server.store.versions import (
    add_first_version,
    add_version,
    changes_of,
    creator_of,
    mark_deleted,
    note_measurement,
    release,
    versions_of,
)

_RECORD = TypeAdapter(RoundRecord)
_RUN_FILE = TypeAdapter(RunFile)
_RUN, _ROUND, _ASSIGNMENT = table_of(tables.RunRow), table_of(tables.RoundRow), table_of(tables.AssignmentRow)
_UPLOAD, _SEALED = table_of(tables.UploadRow), table_of(tables.SealedSharesRow)
_PARTIAL, _LEASE = table_of(tables.PartialSumRow), table_of(tables.LeaseRow)
_RELAYED = table_of(tables.RelayedRevealRow)


class Transition(Protocol):
    """What `step` asks, inside its transaction: nothing here may wait for anything."""

    @property
    def uploads_of(self) -> Sequence[AssignmentId]:
        """The assignments whose uploads `decide` must see."""
        ...

    @property
    def reads_history(self) -> bool:
        """Whether the two below must see the run's versions."""
        ...

    def decide(
        self, live: LiveRun, uploads: Mapping[AssignmentId, StoredUpload], history: Sequence[KeptVersion]
    ) -> Change:
        """What happens now. `live` is what is stored at this moment."""
        ...

    @property
    def deposition(self) -> Deposition | None:
        """What is told of the clients of the attempt that `decide` has just ended, where it was worked out before."""
        ...

    def depose(
        self,
        state: Abandoned | Committed,
        assignments: Sequence[StoredAssignment],
        evidence: Mapping[ClientId, ClientEvidence],
    ) -> Deposition:
        """The same, where it was not. It runs in another thread, as does `end`."""
        ...

    def end(
        self, run: StoredRun, state: Abandoned | Committed, deposition: Deposition, history: Sequence[KeptVersion]
    ) -> RoundEnd:
        """How the attempt ends that `decide` has just ended, and what comes next."""
        ...


class RoundStore:
    """The stored side of every run's newest attempt. `replica`: the name of this process among the coordinators.

    `trail`: what is signed of it, in the same transaction.
    """

    def __init__(
        self, database: Database, replica: str, trail: AuditTrail, scribe: Scribe, member_lists: MemberListStore
    ) -> None:
        self._db = database
        self._replica = replica
        self._trail = trail
        self._scribe = scribe
        self._member_lists = member_lists

    # --- runs ---------------------------------------------------------------------------------------------------------

    async def add_run(
        self,
        file: RunFile,
        model: ModelRef,
        master_sha256: str,
        state: Recruiting,
        now: float,
        members: SignedMembers | None = None,
    ) -> None:
        """Create a run with version 0 of its model and its first round. `members`: the list that its file names."""
        async with self._db.writing("add_run") as tx:
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
                "run_file_sha256": "",
                "audit_number": 0,
                "audit_sha256": "",
            }
            await tx.execute(insert(_RUN).values(run))
            if members is not None:
                await self._member_lists.write(tx, RunId(file.name), members)
            await add_first_version(tx, RunId(file.name), model, master_sha256, now)
            await release(tx, creator_of(RunId(file.name), model.sha256))
            round_id = await add_round(tx, state)
            await tx.execute(update(_RUN).where(_RUN.c.name == file.name).values(round_id=round_id))
            await self._trail.begin(tx, file, model, master_sha256, now)

    async def revisions(self) -> Mapping[RunId, int]:
        """Every run, in the order of their creation, and how often it has changed."""
        query = select(_RUN.c.name, _RUN.c.revision).order_by(_RUN.c.created_at, _RUN.c.name)
        async with self._db.reading() as tx:
            return {RunId(row.name): row.revision for row in await tx.execute(query)}

    async def load(self, name: RunId) -> LiveRun | None:
        """A run as it is stored now."""
        async with self._db.reading() as tx:
            row = (await tx.execute(select(_RUN).where(_RUN.c.name == name))).one_or_none()
            return None if row is None else await caught_up(tx, row, None)

    async def refresh(self, known: LiveRun) -> LiveRun:
        """The run as it is stored now; `known` itself if nothing has changed."""
        async with self._db.reading() as tx:
            row = (await tx.execute(select(_RUN).where(_RUN.c.name == known.name))).one()
            return await caught_up(tx, row, known)

    async def step(self, known: LiveRun, transition: Transition) -> tuple[LiveRun, Ended | None]:
        """Move a run on; how the attempt ended, if this has ended it. All of it is durable on return."""
        async with self._db.writing("step") as tx:
            live = await self._locked(tx, known)
            uploads = await uploads_of(tx, transition.uploads_of, for_update=True)
            history = await versions_of(tx, live.name) if transition.reads_history else ()
            change = transition.decide(live, uploads, history)
            if change.state is live.state and change.status is None:
                return live, None
            revision = live.revision + 1
            await self._save(tx, live, change, revision)
            run = live.run
            if change.status is not None:
                run = replace(run, status=change.status[0], reason=change.status[1])
            live = replace(live, run=run, state=change.state, folded_by=self._folded(live, change), revision=revision)
            is_ended = isinstance(change.state, Committed | Abandoned)
            if not is_ended:
                await save_run(tx, live, revision)
                return live, None
            assert isinstance(change.state, Committed | Abandoned)
            if (deposition := transition.deposition) is None:
                witnesses = await assignments_of(tx, live.round_id), await evidence_of(tx, live.round_id)
                deposition = await self._scribe.run(transition.depose, change.state, *witnesses)
            end = await self._scribe.run(transition.end, run, change.state, deposition, history)
            return await self._end(tx, live, end, deposition)

    async def _locked(self, tx: AsyncConnection, known: LiveRun) -> LiveRun:
        query = select(_RUN).where(_RUN.c.name == known.name).with_for_update()
        return await caught_up(tx, (await tx.execute(query)).one(), known)

    async def _save(self, tx: AsyncConnection, live: LiveRun, change: Change, revision: int) -> None:
        """The attempt's new state: its head, and the rows of the clients that it changes."""
        await tx.execute(update(_ROUND).where(_ROUND.c.id == live.round_id).values(head=head_of(change.state)))
        changed = changed_columns(live.state, change.state)
        if isinstance(live.state, Recruiting):
            fresh = {"round_id": live.round_id, "revision": revision, "bytes_up": 0, "bytes_down": 0}
            rows = [
                {"id": live.assignment_id(client), "client": client, **columns, **fresh}
                for client, columns in changed.items()
            ]
            if rows:
                await tx.execute(insert(_ASSIGNMENT), rows)
        else:
            await update_assignments(
                tx, {live.assignment_id(client): {**new, "revision": revision} for client, new in changed.items()}
            )
        if change.declined:
            assert isinstance(change.state, Closing | Abandoned), "an open round knows who has declined"
            missing = change.state.missing
            await update_assignments(
                tx, {live.assignment_id(client): {"declined": missing[client]} for client in change.declined}
            )
        await _count(tx, change.traffic)
        if change.sealed:
            rows = [{"assignment": assignment, "body": body} for assignment, body in change.sealed]
            await tx.execute(insert(_SEALED), rows)
        told = {
            one.assignment: {
                "outcome": one.answer.outcome.value,
                "reason": one.answer.reason,
                "reported_at": one.at,
                "replica": self._replica if live.plan.task.makes_model else None,
                "signed_report": signed_text(one.signed),
            }
            for one in change.answered
        }
        await update_assignments(tx, told)

    def _folded(self, live: LiveRun, change: Change) -> Mapping[ClientId, str]:
        if not change.answered or not live.plan.task.makes_model:
            return live.folded_by
        return {**live.folded_by, **dict.fromkeys((one.client for one in change.answered), self._replica)}

    async def _end(
        self, tx: AsyncConnection, live: LiveRun, end: RoundEnd, deposition: Deposition
    ) -> tuple[LiveRun, Ended]:
        record = (await self._scribe.run(_RECORD.dump_json, end.record)).decode()
        await tx.execute(update(_ROUND).where(_ROUND.c.id == live.round_id).values(record=record))
        head = await self._trail.end(tx, live, end, deposition)
        keys = [
            *head.keys,
            *await tx.scalars(select(_PARTIAL.c.key).where(_PARTIAL.c.round_id == live.round_id)),
        ]
        await tx.execute(delete(_PARTIAL).where(_PARTIAL.c.round_id == live.round_id))
        if live.plan.is_secure:
            mine = select(_ASSIGNMENT.c.id).where(_ASSIGNMENT.c.round_id == live.round_id)
            await tx.execute(delete(_SEALED).where(_SEALED.c.assignment.in_(mine)))
        await tx.execute(delete(_LEASE).where(_LEASE.c.job == closing_job(live.round_id)))
        await tx.execute(delete(_RELAYED).where(_RELAYED.c.round_id == live.round_id))  # no more is put in without it
        run = replace(
            live.run, status=end.status, reason=end.reason, audit_number=head.number, audit_sha256=head.sha256
        )
        await release(tx, closing_job(live.round_id))
        ended_at = end.record.opened_at + end.record.wall_s
        if end.measured is not None:
            await note_measurement(tx, live.name, end.measured)
        if end.model is not None:
            await add_version(tx, live.name, end.model, ended_at)
            run = replace(run, model=end.model.ref, master_sha256=end.model.master_sha256)
        if end.deleted:
            await mark_deleted(tx, live.name, end.deleted, ended_at)
        if end.model is not None or end.deleted:
            run = replace(run, changes=await changes_of(tx, live.name))
        after = replace(live, run=run)
        if end.next_state is not None:
            round_id = await add_round(tx, end.next_state)
            after = replace(after, round_id=round_id, state=end.next_state, folded_by={})
        await save_run(tx, after, after.revision)
        return after, Ended(end, tuple(keys))

    # --- who folds what -----------------------------------------------------------------------------------------------

    async def adopt(self, known: LiveRun, dead: Iterable[str]) -> LiveRun:
        """Take over what replicas that have died were to fold, unless it is in a partial sum that is in the blob store.

        Nothing is taken over if the round has moved on from the phase that is `known`: then it may be for others to do.
        """
        async with self._db.writing("adopt") as tx:
            live = await self._locked(tx, known)
            posted = select(_PARTIAL.c.clients).where(_PARTIAL.c.round_id == live.round_id)
            covered = {client for clients in await tx.scalars(posted) for client in json.loads(clients)}
            gone = set(dead)
            orphans = [client for client, by in live.folded_by.items() if by in gone and client not in covered]
            if not orphans or live.round_id != known.round_id or live.state.phase != known.state.phase:
                return live
            revision = live.revision + 1
            adopted = {"replica": self._replica, "revision": revision}
            await update_assignments(tx, {live.assignment_id(client): adopted for client in sorted(orphans)})
            folded_by = {**live.folded_by, **dict.fromkeys(orphans, self._replica)}
            live = replace(live, folded_by=folded_by, revision=revision)
            await save_run(tx, live, revision)
            return live

    async def post_partial_sum(self, known: LiveRun, partial: PartialSum) -> bool:
        """Offer this replica's sum to whoever closes the round; False if not all in it is this replica's to answer for.

        Once it is posted, nobody adopts what is in it. Posted again, with more in it, it takes the place of what was
        posted before; False for one that lacks some of that, whose updates may be gone.
        """
        async with self._db.writing("post_partial_sum") as tx:
            live = await self._locked(tx, known)
            mine = {client for client, replica in live.folded_by.items() if replica == self._replica}
            is_over = isinstance(live.state, Committed | Abandoned)  # of the run's last attempt: no other follows
            if is_over or live.round_id != known.round_id or not mine.issuperset(partial.clients):
                return False
            mine_before = (_PARTIAL.c.round_id == live.round_id, _PARTIAL.c.replica == self._replica)
            before = (await tx.execute(select(_PARTIAL.c.clients).where(*mine_before))).scalar_one_or_none()
            if before is not None and not set(partial.clients).issuperset(json.loads(before)):
                return False
            row = {
                "round_id": live.round_id,
                "replica": self._replica,
                "key": partial.key,
                "sha256": partial.sha256,
                "clients": json.dumps(partial.clients),
                "total_weight": partial.total_weight,
            }
            await tx.execute(delete(_PARTIAL).where(*mine_before))
            await tx.execute(insert(_PARTIAL).values(row))
            return True

    async def sealed_shares(self, round_id: int) -> Mapping[ClientId, bytes]:
        """The ShareKeys messages of a secure round, by who sent them."""
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
        """Any attempt's state, whole."""
        async with self._db.reading() as tx:
            head = (await tx.execute(select(_ROUND.c.head).where(_ROUND.c.id == round_id))).scalar_one()
            return state_of(head, [client_row(row) for row in await rows_of(tx, round_id, 0)])

    async def open_names(self) -> tuple[frozenset[str], frozenset[str]]:
        """The assignments whose updates are needed, and the ids of attempts whose partial sums are.

        They are of attempts that have not ended, or kept for a replay: those that are not lose their rows.
        """
        is_open = _ROUND.c.record.is_(None)
        assignments = select(_ASSIGNMENT.c.id).join(_ROUND, _ROUND.c.id == _ASSIGNMENT.c.round_id).where(is_open)
        async with self._db.reading() as tx:
            names = frozenset((await tx.scalars(union(assignments, select(_UPLOAD.c.assignment)))).all())
            rounds = frozenset(str(one) for one in await tx.scalars(select(_ROUND.c.id).where(is_open)))
        return names, rounds

    async def ended(self, name: RunId, after: int, limit: int) -> tuple[RoundRecord, ...]:
        """The records of ended attempts from the `after`-th on, oldest first."""
        query = select(_ROUND.c.record).where(_ROUND.c.run == name, _ROUND.c.record.is_not(None))
        async with self._db.reading() as tx:
            rows = (await tx.scalars(query.order_by(_ROUND.c.id).offset(after).limit(limit))).all()
        return tuple(_RECORD.validate_json(row) for row in rows)

    async def newest_ended(self, name: RunId, count: int, after: int = 0) -> tuple[StoredRecord, ...]:
        """The records of the attempts that ended last, oldest first. `after`: only of those with a greater id."""
        mine = (_ROUND.c.run == name, _ROUND.c.id > after, _ROUND.c.record.is_not(None))
        query = select(_ROUND.c.id, _ROUND.c.record).where(*mine).order_by(_ROUND.c.id.desc()).limit(count)
        async with self._db.reading() as tx:
            rows = (await tx.execute(query)).all()
        return tuple(StoredRecord(row.id, _RECORD.validate_json(row.record)) for row in reversed(rows))

    async def assignments(self, round_id: int) -> tuple[StoredAssignment, ...]:
        """Every client of an attempt."""
        async with self._db.reading() as tx:
            return await assignments_of(tx, round_id)

    async def witnesses(self, round_id: int) -> tuple[tuple[StoredAssignment, ...], Mapping[ClientId, ClientEvidence]]:
        """Every client of an attempt that has not ended, and what it has signed."""
        async with self._db.reading() as tx:
            return await assignments_of(tx, round_id), await evidence_of(tx, round_id)

    async def assignment(self, assignment: AssignmentId) -> StoredAssignment | None:
        """One assignment with its upload."""
        async with self._db.reading() as tx:
            row = (await tx.execute(WITH_HEARD.where(_ASSIGNMENT.c.id == assignment))).one_or_none()
            if row is None:
                return None
            uploads = await uploads_of(tx, [assignment])
        return replace(assignment_of(row), upload=uploads.get(assignment))

    async def add_traffic(self, name: RunId, traffic: Traffic) -> None:
        """Add to the bytes of each assignment of a run, under its lock: it touches many rows."""
        if not traffic.assignments:
            return
        async with self._db.writing("add_traffic") as tx:
            await tx.execute(select(_RUN.c.name).where(_RUN.c.name == name).with_for_update())
            await _count(tx, traffic)


async def _count(tx: AsyncConnection, traffic: Traffic) -> None:
    """Add to the bytes of assignments. Uploads add to them too, outside the run's lock: only ever add."""
    rows = [{"id_": one, "up": traffic.up[one], "down": traffic.down[one]} for one in traffic.assignments]
    if rows:
        sums = {
            "bytes_up": _ASSIGNMENT.c.bytes_up + bindparam("up"),
            "bytes_down": _ASSIGNMENT.c.bytes_down + bindparam("down"),
        }
        await tx.execute(update(_ASSIGNMENT).where(_ASSIGNMENT.c.id == bindparam("id_")).values(sums), rows)
