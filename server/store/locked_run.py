"""One run within a transaction, with its row locked: loads and saves what a step needs."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from umbel.aggregation.audit.bundle import Sealed
from umbel.aggregation.round.states import Abandoned, Closing, Committed, Recruiting
from umbel.aggregation.run.run_end import KeptVersion, RoundEnd
from umbel.aggregation.types import AssignmentId, ClientId
from umbel.server.store import tables
from umbel.server.store.audit_rows import (
    Expired,
    add_bundle,
    drop_updates,
    evidence_of,
    mark_updates_deleted,
    rounds_with_updates,
    signed_text,
)
from umbel.server.store.replicas import closing_job
from umbel.server.store.round_rows import changed_columns, head_of
from umbel.server.store.run_rows import add_round, add_traffic, assignments_of, save_run, update_assignments
from umbel.server.store.stored import (
    Change,
    ClientEvidence,
    Ended,
    LiveRun,
    PartialSum,
    StoredAssignment,
    StoredUpload,
)
from umbel.server.store.tables import table_of
from umbel.server.store.uploads import uploads_of
from umbel.server.store.versions import add_version, changes_of, mark_deleted, note_measurement, release, versions_of

_RUN, _ROUND, _ASSIGNMENT = table_of(tables.RunRow), table_of(tables.RoundRow), table_of(tables.AssignmentRow)
_SEALED, _PARTIAL = table_of(tables.SealedSharesRow), table_of(tables.PartialSumRow)
_LEASE, _RELAYED = table_of(tables.LeaseRow), table_of(tables.RelayedRevealRow)


@dataclass(frozen=True, slots=True)
class EndedAttempt:
    """How an attempt ended, to be stored."""

    end: RoundEnd
    record: str  # of the round, as JSON
    bundle: Sealed
    keeps_updates: bool  # the accepted ones
    expired: Sequence[Expired]  # earlier rounds whose updates are deleted now


class LockedRun:
    """`live`: the run at this point of the transaction. `replica`: the name of this process."""

    def __init__(self, tx: AsyncConnection, live: LiveRun, replica: str) -> None:
        self.live = live
        self._tx = tx
        self._replica = replica

    # --- reading ------------------------------------------------------------------------------------------------------

    async def uploads(self, assignments: Sequence[AssignmentId]) -> Mapping[AssignmentId, StoredUpload]:
        """The uploads of these assignments, locked until the transaction ends."""
        return await uploads_of(self._tx, assignments, for_update=True)

    async def history(self) -> tuple[KeptVersion, ...]:
        """Every version of the run, in order."""
        return await versions_of(self._tx, self.live.name)

    async def clients(self) -> tuple[tuple[StoredAssignment, ...], dict[ClientId, ClientEvidence]]:
        """Every client of the attempt, and the evidence of it."""
        return await assignments_of(self._tx, self.live.round_id), await evidence_of(self._tx, self.live.round_id)

    async def with_updates_until(self, number: int) -> list[Expired]:
        """The rounds of the run up to this number whose updates are kept."""
        return await rounds_with_updates(self._tx, self.live.name, number)

    # --- writing ------------------------------------------------------------------------------------------------------

    async def save(self, change: Change) -> None:
        """Store the attempt's new state: its head, and the rows of clients that changed."""
        live, tx, revision = self.live, self._tx, self.live.revision + 1
        await tx.execute(update(_ROUND).where(_ROUND.c.id == live.round_id).values(head=head_of(change.state)))
        await self._save_clients(change, revision)
        if change.declined:
            assert isinstance(change.state, Closing | Abandoned), "an open round knows who has declined"
            missing = change.state.missing
            await update_assignments(
                tx, {live.assignment_id(client): {"declined": missing[client]} for client in change.declined}
            )
        await add_traffic(tx, change.traffic)
        if change.sealed:
            rows = [{"assignment": assignment, "body": body} for assignment, body in change.sealed]
            await tx.execute(insert(_SEALED), rows)
        await self._save_answers(change)
        run = live.run
        if change.status is not None:
            run = replace(run, status=change.status[0], reason=change.status[1])
        self.live = replace(live, run=run, state=change.state, folded_by=self._folded_by(change), revision=revision)

    async def _save_clients(self, change: Change, revision: int) -> None:
        live, changed = self.live, changed_columns(self.live.state, change.state)
        if not isinstance(live.state, Recruiting):
            columns = {live.assignment_id(client): {**new, "revision": revision} for client, new in changed.items()}
            await update_assignments(self._tx, columns)
        elif changed:
            fresh = {"round_id": live.round_id, "revision": revision, "bytes_up": 0, "bytes_down": 0}
            ids = {client: live.assignment_id(client) for client in changed}
            rows = [{"id": ids[client], "client": client, **new, **fresh} for client, new in changed.items()]
            await self._tx.execute(insert(_ASSIGNMENT), rows)

    async def _save_answers(self, change: Change) -> None:
        answers = {
            one.assignment: {
                "outcome": one.answer.outcome.value,
                "reason": one.answer.reason,
                "reported_at": one.at,
                "replica": self._replica if self.live.plan.adds_up else None,
                "signed_report": signed_text(one.signed),
            }
            for one in change.answered
        }
        await update_assignments(self._tx, answers)

    def _folded_by(self, change: Change) -> Mapping[ClientId, str]:
        if not change.answered or not self.live.plan.adds_up:
            return self.live.folded_by
        return {**self.live.folded_by, **dict.fromkeys((one.client for one in change.answered), self._replica)}

    async def end(self, ended: EndedAttempt) -> Ended:
        """Store how the attempt ended, and begin the next. Then only the bundle has a copy of its reports."""
        tx, live, end = self._tx, self.live, ended.end
        ended_at = end.record.opened_at + end.record.wall_s
        await tx.execute(update(_ROUND).where(_ROUND.c.id == live.round_id).values(record=ended.record))
        keys = [*await self._drop_updates(ended, ended_at), *await self._drop_attempt()]
        number = live.run.audit_number + 1
        await add_bundle(tx, live.name, number, ended.bundle, live.round_id, None if ended.keeps_updates else ended_at)
        run = replace(
            live.run, status=end.status, reason=end.reason, audit_number=number, audit_sha256=ended.bundle.sha256
        )
        await release(tx, closing_job(live.round_id))
        if end.measured is not None:
            await note_measurement(tx, live.name, end.measured)
        if end.model is not None:
            await add_version(tx, live.name, end.model, ended_at)
            run = replace(run, model=end.model.ref, master_sha256=end.model.master_sha256)
        if end.deleted:
            await mark_deleted(tx, live.name, end.deleted, ended_at)
        if end.model is not None or end.deleted:
            run = replace(run, changes=await changes_of(tx, live.name))
        self.live = replace(live, run=run)
        if end.next_state is not None:
            round_id = await add_round(tx, end.next_state)
            self.live = replace(self.live, round_id=round_id, state=end.next_state, folded_by={})
        return Ended(end, tuple(keys))

    async def _drop_updates(self, ended: EndedAttempt, now: float) -> list[str]:
        """Delete the rows of the updates that are not kept; returns the keys of their blobs."""
        tx, live = self._tx, self.live
        mine = _ASSIGNMENT.c.round_id == live.round_id
        keys = await drop_updates(tx, mine & _ASSIGNMENT.c.weight.is_(None) if ended.keeps_updates else mine)
        if ended.expired:
            keys += await drop_updates(tx, _ASSIGNMENT.c.round_id.in_([one.round_id for one in ended.expired]))
            await mark_updates_deleted(tx, live.name, [one.number for one in ended.expired], now)
        await tx.execute(
            update(_ASSIGNMENT).where(mine, _ASSIGNMENT.c.signed_report.is_not(None)).values(signed_report=None)
        )
        return keys

    async def _drop_attempt(self) -> list[str]:
        """Delete what only an open attempt needs; returns the keys of its blobs."""
        tx, round_id = self._tx, self.live.round_id
        keys = await tx.scalars(select(_PARTIAL.c.key).where(_PARTIAL.c.round_id == round_id))
        await tx.execute(delete(_PARTIAL).where(_PARTIAL.c.round_id == round_id))
        if self.live.plan.is_secure:
            mine = select(_ASSIGNMENT.c.id).where(_ASSIGNMENT.c.round_id == round_id)
            await tx.execute(delete(_SEALED).where(_SEALED.c.assignment.in_(mine)))
        await tx.execute(delete(_LEASE).where(_LEASE.c.job == closing_job(round_id)))
        await tx.execute(delete(_RELAYED).where(_RELAYED.c.round_id == round_id))  # without the lease no row is added
        return list(keys)

    async def adopt(self, dead: Collection[str]) -> None:
        """Take over the updates that these replicas were to fold, except those in a partial sum."""
        live, revision = self.live, self.live.revision + 1
        posted = select(_PARTIAL.c.clients).where(_PARTIAL.c.round_id == live.round_id)
        covered = {client for clients in await self._tx.scalars(posted) for client in json.loads(clients)}
        orphans = [client for client, by in live.folded_by.items() if by in dead and client not in covered]
        if not orphans:
            return
        adopted = {"replica": self._replica, "revision": revision}
        await update_assignments(self._tx, {live.assignment_id(client): adopted for client in sorted(orphans)})
        folded_by = {**live.folded_by, **dict.fromkeys(orphans, self._replica)}
        self.live = replace(live, folded_by=folded_by, revision=revision)

    async def put_partial_sum(self, partial: PartialSum) -> bool:
        """Replace this replica's partial sum. See `RoundStore.post_partial_sum`."""
        tx, live = self._tx, self.live
        mine = {client for client, replica in live.folded_by.items() if replica == self._replica}
        is_over = isinstance(live.state, Committed | Abandoned)  # the run's last attempt, which no other follows
        if is_over or not mine.issuperset(partial.clients):
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

    async def save_run(self) -> None:
        await save_run(self._tx, self.live)
