"""The stored list of clients that wait for work. Every replica draws its cohorts from it."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Executable, bindparam, case, delete, func, literal_column, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from umbel.aggregation.messages import RunStatus
from umbel.aggregation.round.weighting import Candidate
from umbel.aggregation.types import ClientId, RunId
from umbel.server.store import tables
from umbel.server.store.batches import GATHER_S, Batches
from umbel.server.store.database import Database, Prepared, Write
from umbel.server.store.outage import DatabaseAway
from umbel.server.store.tables import table_of

_log = logging.getLogger(__name__)
_WAITER, _CLIENT = table_of(tables.WaiterRow), table_of(tables.ClientRow)
_RUN, _TOKEN = table_of(tables.RunRow), table_of(tables.TokenRow)
_OPEN = [status.value for status in RunStatus if not status.is_over]
_LEAVE = (
    update(_WAITER)
    .where(
        _WAITER.c.run == bindparam("in_run"),
        _WAITER.c.client == bindparam("who"),
        _WAITER.c.seen_at == bindparam("entered_at"),
    )
    .values(until=literal_column("0"))
)
_ENROLLED = _WAITER.join(_CLIENT, _CLIENT.c.id == _WAITER.c.client)
_COLUMNS = ("run", "client", "sample_count", "tier", "seen_at", "until")
_KEPT_S = 24 * 3600.0  # a client that has checked in within this time belongs to the fleet


@dataclass(frozen=True, slots=True)
class Waiting:
    """A client that has checked in. Times in Unix seconds."""

    run: RunId
    client: ClientId
    sample_count: int
    tier: str
    seen_at: float
    until: float  # it counts as waiting until then
    has_left: bool = False  # the check-in with this `seen_at` has ended


@dataclass(frozen=True, slots=True)
class FleetMember:
    """A client of a run's fleet. Times in Unix seconds."""

    client: ClientId
    sample_count: int
    seen_at: float  # its last check-in
    until: float  # it counted as waiting until then
    heard_at: float  # its last request, roughly


class WaiterStore:
    """The rows of waiting clients."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._upsert = Prepared(_upsert(database.is_sqlite), database.dialect, _COLUMNS)
        self._leave = Prepared(_LEAVE, database.dialect, ("in_run", "who", "entered_at"))
        self._batches: Batches[Waiting, None] = Batches(self._put)
        self._noted: list[Waiting] = []
        self._noting: asyncio.Task[None] | None = None

    async def put(self, waiter: Waiting) -> None:
        """Store a waiter, in one transaction with concurrent calls."""
        await self._batches.do(waiter)

    def note(self, waiter: Waiting) -> None:
        """Store a waiter soon: with the next check-ins (`take_noted`), or in its own transaction."""
        self.note_all([waiter])

    def note_all(self, waiters: Sequence[Waiting]) -> None:
        """Store several soon, for example those taken for a transaction that failed."""
        self._noted[:0] = waiters
        if self._noted and self._noting is None:
            self._noting = asyncio.create_task(self._store_noted(), name="store waiters")

    def take_noted(self) -> Sequence[Waiting]:
        """Take the noted waiters, to store them in a transaction of the caller."""
        noted, self._noted = self._noted, []
        return noted

    async def settle(self) -> None:
        """Wait until everything that was noted is stored."""
        if self._noting is not None:
            await asyncio.wait([self._noting])

    async def _store_noted(self) -> None:
        try:
            while self._noted:
                await asyncio.sleep(GATHER_S)
                if noted := self.take_noted():
                    await self._put(noted)
        except DatabaseAway:
            pass  # logged already
        except SQLAlchemyError as error:
            _log.warning("could not store which clients have left, so they count as waiting a little longer: %s", error)
        finally:
            self._noting = None

    async def _put(self, waiters: Sequence[Waiting]) -> Sequence[None]:
        await self._db.write("put_waiters", self.writes(waiters))
        return [None] * len(waiters)

    def writes(self, waiters: Iterable[Waiting]) -> tuple[Write, ...]:
        """The writes that store these. A client's last check-in counts. A departure ends only its own check-in."""
        last: dict[tuple[str, str], Waiting] = {}
        left: dict[tuple[str, str], Waiting] = {}
        for waiter in waiters:
            (left if waiter.has_left else last)[waiter.run, waiter.client] = waiter
        entered = [
            (one.run, one.client, one.sample_count, one.tier, one.seen_at, one.until) for _, one in sorted(last.items())
        ]
        gone = [(one.run, one.client, one.seen_at) for _, one in sorted(left.items())]
        return self._upsert.of(entered), self._leave.of(gone)

    async def candidates(self, run: RunId, now: float) -> tuple[Candidate, ...]:
        """The clients that wait in a run now."""
        query = select(_WAITER.c.client, _WAITER.c.sample_count, _WAITER.c.tier).select_from(_ENROLLED)
        async with self._db.reading() as tx:
            rows = await tx.execute(query.where(*_waits(run, now)))
            return tuple(Candidate(ClientId(row.client), row.sample_count, row.tier) for row in rows)

    async def count(self, run: RunId, now: float) -> int:
        waiting = select(func.count()).select_from(_ENROLLED).where(*_waits(run, now))
        async with self._db.reading() as tx:
            return int((await tx.execute(waiting)).scalar_one())

    async def population(self, run: RunId, now: float) -> int:
        """How many clients have checked in for a run within a day."""
        query = select(func.count()).select_from(_WAITER).where(_WAITER.c.run == run, _WAITER.c.seen_at > now - _KEPT_S)
        async with self._db.reading() as tx:
            return int((await tx.execute(query)).scalar_one())

    async def fleet(self, run: RunId, now: float, limit: int) -> tuple[FleetMember, ...]:
        """At most `limit` clients that have checked in for a run within a day and were not removed."""
        heard_at = case((_CLIENT.c.last_heard_at > _WAITER.c.seen_at, _CLIENT.c.last_heard_at), else_=_WAITER.c.seen_at)
        query = (
            select(
                _WAITER.c.client, _WAITER.c.sample_count, _WAITER.c.seen_at, _WAITER.c.until, heard_at.label("heard")
            )
            .select_from(_ENROLLED)
            .where(_WAITER.c.run == run, _WAITER.c.seen_at > now - _KEPT_S, _CLIENT.c.revoked_at.is_(None))
            .limit(limit)
        )
        async with self._db.reading() as tx:
            rows = await tx.execute(query)
            return tuple(FleetMember(ClientId(row[0]), row[1], row[2], row[3], row[4]) for row in rows)

    async def newcomers(self, run: RunId, now: float, limit: int, agents: Collection[str] = ()) -> tuple[ClientId, ...]:
        """At most `limit` clients that may come to a run: heard within a day, and not at work in another one.

        `agents`: clients that may come although they are at work in others.
        """
        at_work = (
            select(_WAITER.c.client)
            .join(_RUN, _RUN.c.name == _WAITER.c.run)
            .where(_WAITER.c.run != run, _WAITER.c.seen_at > now - _KEPT_S, _RUN.c.status.in_(_OPEN))
        )
        lately = (_CLIENT.c.revoked_at.is_(None), _CLIENT.c.last_heard_at > now - _KEPT_S)
        may_come = or_(_CLIENT.c.id.not_in(at_work), _CLIENT.c.id.in_(agents))
        query = select(_CLIENT.c.id).where(*lately, may_come).order_by(_CLIENT.c.id).limit(limit)
        async with self._db.reading() as tx:
            return tuple(ClientId(name) for name in await tx.scalars(query))

    async def unused_tokens(self, now: float, limit: int) -> tuple[str | None, ...]:
        """The names that unused enrolment tokens of the last day bind; None for a token that binds none."""
        is_out = (_TOKEN.c.used_by.is_(None), _TOKEN.c.expires_at > now, _TOKEN.c.created_at > now - _KEPT_S)
        async with self._db.reading() as tx:
            return tuple(await tx.scalars(select(_TOKEN.c.client).where(*is_out).limit(limit)))

    async def sweep(self, now: float) -> None:
        """Delete the clients that have not checked in within a day."""
        async with self._db.writing("sweep_waiters") as tx:
            await tx.execute(delete(_WAITER).where(_WAITER.c.seen_at <= now - _KEPT_S))


def _waits(run: RunId, now: float) -> tuple[ColumnElement[bool], ...]:
    """A removed client does not wait, even if its check-in was stored after its removal."""
    return (_WAITER.c.run == run, _WAITER.c.until > now, _CLIENT.c.revoked_at.is_(None))


def _upsert(is_sqlite: bool) -> Executable:
    statement = (sqlite.insert if is_sqlite else postgresql.insert)(_WAITER)
    changed = {name: statement.excluded[name] for name in _COLUMNS[2:]}
    return statement.on_conflict_do_update(index_elements=["run", "client"], set_=changed)
