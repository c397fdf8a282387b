"""Reads and writes the rows of a run and its newest attempt within an open transaction."""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Row, Select, bindparam, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from umbel.aggregation.messages import Outcome, ReportAnswer, RunStatus
from umbel.aggregation.plans.assignment import ModelRef
from umbel.aggregation.round.cohort import Member
from umbel.aggregation.round.states import Abandoned, Committed, Recruiting
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.types import AssignmentId, ClientId, RunId
from umbel.server.store import tables
from umbel.server.store.round_rows import ClientFacts, accepted_of, head_of, spoken_of, state_of, with_head, with_rows
from umbel.server.store.stored import LiveRun, StoredAssignment, StoredRun, Traffic
from umbel.server.store.tables import table_of
from umbel.server.store.versions import changes_of

_RUN_FILE = TypeAdapter(RunFile)
_ROWS_AT_ONCE = 1000
_RUN, _ROUND, _ASSIGNMENT = table_of(tables.RunRow), table_of(tables.RoundRow), table_of(tables.AssignmentRow)
_MODEL, _VERSION, _CLIENT = table_of(tables.ModelRow), table_of(tables.ModelVersionRow), table_of(tables.ClientRow)
WITH_LAST_REQUEST = select(_ASSIGNMENT, _CLIENT.c.last_heard_at).join(_CLIENT, _CLIENT.c.id == _ASSIGNMENT.c.client)


async def caught_up(tx: AsyncConnection, row: Row[Any], known: LiveRun | None) -> LiveRun:
    """The run of `row`. Reads only what has changed since `known`."""
    if known is not None and row.revision == known.revision:
        return known
    if known is None or row.round_id != known.round_id:
        return await _loaded(tx, row, known)
    head = (await tx.execute(select(_ROUND.c.head).where(_ROUND.c.id == row.round_id))).scalar_one()
    changed = await rows_of(tx, row.round_id, known.revision)
    state = with_rows(with_head(head, known.state), [client_row(one) for one in changed])
    if isinstance(state, Committed | Abandoned):
        return await _loaded(tx, row, known)  # the run's last round, which may have made a model
    run = replace(known.run, status=RunStatus(row.status), reason=row.reason)
    return LiveRun(run, row.round_id, state, {**known.folded_by, **_folded_by(changed)}, row.revision)


async def _loaded(tx: AsyncConnection, row: Row[Any], known: LiveRun | None) -> LiveRun:
    version = (
        await tx.execute(
            select(_VERSION, _MODEL.c.size_bytes, _MODEL.c.layout_digest)
            .join(_MODEL, _MODEL.c.sha256 == _VERSION.c.sha256)
            .where(_VERSION.c.run == row.name)
            .order_by(_VERSION.c.version.desc())
            .limit(1)
        )
    ).one()
    run = StoredRun(
        file=known.run.file if known else _RUN_FILE.validate_json(row.run_file),
        status=RunStatus(row.status),
        reason=row.reason,
        created_at=row.created_at,
        model=ModelRef(version.version, version.sha256, version.size_bytes, version.layout_digest),
        master_sha256=version.master_sha256,
        first_model_sha256=row.model_sha256,
        salt=row.salt,
        audit_number=row.audit_number,
        audit_sha256=row.audit_sha256,
        file_sha256=row.run_file_sha256,
        changes=await changes_of(tx, RunId(row.name)),
    )
    head = (await tx.execute(select(_ROUND.c.head).where(_ROUND.c.id == row.round_id))).scalar_one()
    rows = await rows_of(tx, row.round_id, 0)
    state = state_of(head, [client_row(one) for one in rows])
    return LiveRun(run, row.round_id, state, _folded_by(rows), row.revision)


async def rows_of(tx: AsyncConnection, round_id: int, after: int) -> Sequence[Row[Any]]:
    """The rows of an attempt that have changed after a revision, by client."""
    changed = select(_ASSIGNMENT).where(_ASSIGNMENT.c.round_id == round_id, _ASSIGNMENT.c.revision > after)
    return (await tx.execute(changed.order_by(_ASSIGNMENT.c.client))).all()


def client_row(row: Row[Any]) -> ClientFacts:
    member = Member(row.draws, row.sample_count, row.tier)
    accepted, said = accepted_of(row.weight, row.work), spoken_of(row.spoken)
    return ClientFacts(ClientId(row.client), member, accepted, row.declined, row.missing, said)


def _folded_by(rows: Iterable[Row[Any]]) -> dict[ClientId, str]:
    return {ClientId(row.client): row.replica for row in rows if row.replica is not None}


async def assignments_of(tx: AsyncConnection, round_id: int) -> tuple[StoredAssignment, ...]:
    """Every client of an attempt."""
    query = WITH_LAST_REQUEST.where(_ASSIGNMENT.c.round_id == round_id)
    return tuple([assignment_of(row) async for row in by_client(tx, query)])


async def by_client(tx: AsyncConnection, query: Select[*tuple[Any, ...]]) -> AsyncGenerator[Row[*tuple[Any, ...]]]:
    """Assignments of one attempt, sorted by client. They are read in parts, so that other tasks run in between."""
    client, part = _ASSIGNMENT.c.client, query.order_by(_ASSIGNMENT.c.client).limit(_ROWS_AT_ONCE)
    rows = (await tx.execute(part)).all()
    while rows:
        for row in rows:
            yield row
        if len(rows) < _ROWS_AT_ONCE:
            return
        rows = (await tx.execute(part.where(client > rows[-1].client))).all()


def assignment_of(row: Row[Any]) -> StoredAssignment:
    return StoredAssignment(
        id=AssignmentId(row.id),
        round_id=row.round_id,
        client=ClientId(row.client),
        sample_count=row.sample_count,
        is_declined=row.declined is not None,
        answer=None if row.outcome is None else ReportAnswer(Outcome(row.outcome), row.reason or ""),
        reported_at=row.reported_at,
        bytes_up=row.bytes_up,
        bytes_down=row.bytes_down,
        heard_at=row.last_heard_at,
    )


async def update_assignments(tx: AsyncConnection, columns: Mapping[AssignmentId, Mapping[str, object]]) -> None:
    """Update assignments with one statement. Each must have the same columns."""
    if not columns:
        return
    names = next(iter(columns.values()))
    rows = [{"id_": name, **{f"{key}_": value for key, value in new.items()}} for name, new in columns.items()]
    values: dict[str, Any] = {name: bindparam(f"{name}_") for name in names}
    await tx.execute(update(_ASSIGNMENT).where(_ASSIGNMENT.c.id == bindparam("id_")).values(values), rows)


async def add_traffic(tx: AsyncConnection, traffic: Traffic) -> None:
    """Add to the bytes of assignments. Only ever add, because uploads add to them without the run's lock."""
    rows = [{"id_": one, "up": traffic.up[one], "down": traffic.down[one]} for one in traffic.assignments]
    if rows:
        sums = {
            "bytes_up": _ASSIGNMENT.c.bytes_up + bindparam("up"),
            "bytes_down": _ASSIGNMENT.c.bytes_down + bindparam("down"),
        }
        await tx.execute(update(_ASSIGNMENT).where(_ASSIGNMENT.c.id == bindparam("id_")).values(sums), rows)


async def save_run(tx: AsyncConnection, live: LiveRun) -> None:
    columns = {
        "status": live.run.status.value,
        "reason": live.run.reason,
        "round_id": live.round_id,
        "revision": live.revision,
        "audit_number": live.run.audit_number,
        "audit_sha256": live.run.audit_sha256,
    }
    await tx.execute(update(_RUN).where(_RUN.c.name == live.name).values(columns))


async def add_round(tx: AsyncConnection, state: Recruiting) -> int:
    plan = state.plan
    names = {"run": plan.run, "task": plan.task.value, "number": plan.number, "attempt": plan.attempt}
    row = {**names, "head": head_of(state)}
    return int((await tx.execute(insert(_ROUND).values(row).returning(_ROUND.c.id))).scalar_one())
