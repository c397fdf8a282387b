"""The coordinator processes that share one database: which are alive, what each does, and how far their clocks differ.

Each replica increments a counter in its own row. The others read it every `BEAT_S`. A replica whose counter has not
changed for `DEAD_AFTER_LOOKS` looks is considered dead, and its jobs are free. Looks are counted instead of seconds: a
replica that was stopped, or cut off from the database, does not look meanwhile, and considers nobody dead. So none of
this depends on synchronized clocks. A replica that is considered dead by mistake does no harm, because the lock of the
run's row decides between two replicas that do the same.

Round windows, the count of waiting clients and the age of signatures (`CLOCK_SKEW_S`) do depend on the clock. If the
clocks of two coordinators differ by minutes, rounds end early, and one coordinator refuses honest clients. So each look
also compares this machine's clock with the database's.
"""

import asyncio
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Double, cast, delete, extract, func, insert, literal, select, update
from sqlalchemy.dialects import postgresql, sqlite

from umbel.aggregation.round.states import Outage
from umbel.aggregation.types import ClientId
from umbel.server.clock import Clock
from umbel.server.stopping import stopped
from umbel.server.store import tables
from umbel.server.store.database import Database
from umbel.server.store.outage import DatabaseAway
from umbel.server.store.tables import table_of

_log = logging.getLogger(__name__)
BEAT_S = 0.5
DEAD_AFTER_LOOKS = 4
_FORGET_AFTER_LOOKS = 400
_REPLICA, _LEASE = table_of(tables.ReplicaRow), table_of(tables.LeaseRow)
_RELAYED = table_of(tables.RelayedRevealRow)
APART_MAX_S = 10.0
APART_WARN_S = 1.0
SIGN_S = 1.0
OUTAGE_S = 3.0  # a shorter gap is a busy disk, or a failover to another replica
_SIGN, _ID = table_of(tables.SignOfLifeRow), 1


def closing_job(round_id: int) -> str:
    """The job of making a closed round's model. Its lease is deleted when the round ends."""
    return f"close.{round_id}"


@dataclass(slots=True)
class _WatchedReplica:
    beat: int
    n_unchanged: int = 0  # looks in a row


class Replicas:
    """This replica among the others."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self.id = secrets.token_hex(8)  # new with every start
        self.is_alone = database.is_sqlite  # the file is in a directory that one coordinator locks
        self._db = database
        self._clock = clock
        self._watched: dict[str, _WatchedReplica] = {}
        self._gone: set[str] = set()
        self._n_looks = 0
        self._clock_watch = ClockWatch()
        self._first_named: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Add this replica to the list. If it is alone, it removes all earlier ones."""
        async with self._db.writing("enter_replica") as tx:
            if self.is_alone:
                await tx.execute(delete(_REPLICA))
                await tx.execute(delete(_LEASE))
            await tx.execute(insert(_REPLICA).values(id=self.id, beat=0, started_at=self._clock.now()))
        if not self.is_alone:
            await self._look()
            self._task = asyncio.create_task(self._keep_beating(), name="heartbeat")

    async def close(self) -> None:
        """Leave the list, so that other replicas take over its jobs at once."""
        if self._task is not None:
            await stopped(self._task)
        async with self._db.writing("leave_replica") as tx:
            await tx.execute(delete(_LEASE).where(_LEASE.c.replica == self.id))
            await tx.execute(delete(_REPLICA).where(_REPLICA.c.id == self.id))

    def is_alive(self, replica: str) -> bool:
        """Whether a replica may still be working, as far as this one knows."""
        if replica == self.id:
            return True
        if (watched := self._watched.get(replica)) is not None:
            return watched.n_unchanged < DEAD_AFTER_LOOKS
        if self.is_alone or replica in self._gone:
            return False
        # A row names a replica that is not in the list: it may have started after the last look, so look twice more.
        return self._n_looks < self._first_named.setdefault(replica, self._n_looks) + 2

    async def take(self, job: str) -> bool:
        """Take a job that is free or held by a dead replica; returns whether this replica now has it."""
        if self.is_alone:
            return True
        async with self._db.reading() as tx:
            holder = (await tx.execute(select(_LEASE.c.replica).where(_LEASE.c.job == job))).scalar_one_or_none()
        if holder is not None and self.is_alive(holder):
            return bool(holder == self.id)
        async with self._db.writing("take_lease") as tx:
            holder = (
                await tx.execute(select(_LEASE.c.replica).where(_LEASE.c.job == job).with_for_update())
            ).scalar_one_or_none()
            if holder is not None and holder == self.id:
                return True
            if holder is not None and self.is_alive(holder):
                return False
            if holder is None:
                free = postgresql.insert(_LEASE).values(job=job, replica=self.id).on_conflict_do_nothing()
                return (await tx.execute(free.returning(_LEASE.c.job))).one_or_none() is not None
            mine = {"replica": self.id, "relay_key": None, "relay_signature": None}
            await tx.execute(update(_LEASE).where(_LEASE.c.job == job).values(mine))
            _log.warning("job %s: taken over from replica %s, which stopped", job, holder)
            return True

    async def _keep_beating(self) -> None:
        while True:
            try:
                await self._beat()
                await self._look()
            except DatabaseAway:
                pass  # logged already
            except Exception:
                _log.exception("the heartbeat of this replica in the database failed; trying again")
            await asyncio.sleep(BEAT_S)

    async def _beat(self) -> None:
        async with self._db.writing("beat") as tx:
            found = await tx.execute(update(_REPLICA).where(_REPLICA.c.id == self.id).values(beat=_REPLICA.c.beat + 1))
            if not found.rowcount:
                await tx.execute(insert(_REPLICA).values(id=self.id, beat=1, started_at=self._clock.now()))
            dead = [name for name, seen in self._watched.items() if seen.n_unchanged > _FORGET_AFTER_LOOKS]
            if dead:
                await tx.execute(delete(_REPLICA).where(_REPLICA.c.id.in_(dead)))

    async def _look(self) -> None:
        async with self._db.reading() as tx:
            before = self._clock.now()
            now = database_now().label("now")
            rows = (await tx.execute(select(_REPLICA.c.id, _REPLICA.c.beat, now))).all()
            after = self._clock.now()
        if rows:
            self._clock_watch.note(ahead_s(before, rows[0].now, after))
        self._n_looks += 1
        found = {row.id: row.beat for row in rows if row.id != self.id}
        for replica, beat in found.items():
            watched = self._watched.get(replica)
            if watched is None or watched.beat != beat:
                self._watched[replica] = _WatchedReplica(beat)
            else:
                watched.n_unchanged += 1
        self._gone = (self._gone | self._watched.keys()) - found.keys()
        for replica in self._watched.keys() - found.keys():
            del self._watched[replica]


@dataclass(frozen=True, slots=True)
class PublishedKey:
    """The relay key of the replica that unmasks a sum, as stored: its signature is not verified yet."""

    key: bytes  # public, 32 bytes
    signature: bytes  # 64 bytes


class RelayStore:
    """What replicas relay to the one that unmasks a sum: its public key, and reveals that are sealed to this key.

    Only on PostgreSQL. The key is stored with the lease of the round's closing, and is deleted with it. The store
    accepts nothing that is sealed to another key. A new key deletes what was sealed to the previous one. Locks are
    taken in this order: the lease, then the relayed rows.
    """

    def __init__(self, database: Database, replica: str) -> None:
        self._db = database
        self._replica = replica

    async def published(self, round_id: int) -> PublishedKey | None:
        """The key of the replica that closes the round; None if there is no such replica or no key yet."""
        query = select(_LEASE.c.relay_key, _LEASE.c.relay_signature).where(_LEASE.c.job == closing_job(round_id))
        async with self._db.reading() as tx:
            row = (await tx.execute(query)).one_or_none()
        return None if row is None or row.relay_key is None else PublishedKey(row.relay_key, row.relay_signature or b"")

    async def publish(self, round_id: int, new: PublishedKey) -> bool:
        """Publish a new key for others to seal to; False if this replica does not close the round."""
        mine = (_LEASE.c.job == closing_job(round_id), _LEASE.c.replica == self._replica)
        async with self._db.writing("publish_relay_key") as tx:
            values = {"relay_key": new.key, "relay_signature": new.signature}
            if not (await tx.execute(update(_LEASE).where(*mine).values(values))).rowcount:
                return False
            await tx.execute(delete(_RELAYED).where(_RELAYED.c.round_id == round_id))
            return True

    async def put(self, round_id: int, key: bytes, sealed: Mapping[ClientId, bytes]) -> bool:
        """Store messages that are sealed to `key`; False, storing none, if it is not the published key any more."""
        query = select(_LEASE.c.relay_key).where(_LEASE.c.job == closing_job(round_id))
        rows = [
            {"round_id": round_id, "client": client, "relay_key": key, "sealed": body}
            for client, body in sorted(sealed.items())
        ]
        async with self._db.writing("relay") as tx:
            if (await tx.execute(query.with_for_update(read=True))).scalar_one_or_none() != key:
                return False
            # A row that exists came from another replica, which the client had sent the same to.
            await tx.execute(postgresql.insert(_RELAYED).on_conflict_do_nothing(), rows)
            return True

    async def take(self, round_id: int, key: bytes) -> Mapping[ClientId, bytes]:
        """Remove and return the messages sealed to `key`, by client."""
        mine = (_RELAYED.c.round_id == round_id, _RELAYED.c.relay_key == key)
        query = select(_RELAYED.c.client, _RELAYED.c.sealed).where(*mine)
        async with self._db.writing("take_relayed") as tx:
            rows = (await tx.execute(query.with_for_update(skip_locked=True))).all()
            if rows:
                taken = _RELAYED.c.client.in_([row.client for row in rows])
                await tx.execute(delete(_RELAYED).where(*mine, taken))
        return {ClientId(row.client): row.sealed for row in rows}


class ClockApart(Exception):
    """This machine's clock differs too much from the database's. The text says what to do."""


def ahead_s(before: float, theirs: float, after: float) -> float:
    """By how much another clock is at least ahead of ours (negative: behind), if read between `before` and `after`."""
    return max(theirs - after, 0.0) + min(theirs - before, 0.0)


def database_now() -> ColumnElement[float]:
    """The time on a PostgreSQL server's clock when it evaluates this row, in Unix seconds."""
    return cast(extract("epoch", func.clock_timestamp()), Double)


async def require_agreement(database: Database, clock: Clock) -> None:
    """Raise `ClockApart` if the clock differs too much from the database's. SQLite uses this machine's clock."""
    if database.is_sqlite:
        return
    async with database.reading() as tx:
        before = clock.now()
        theirs = (await tx.execute(select(database_now()))).scalar_one()
        after = clock.now()
    if abs(apart_s := ahead_s(before, theirs, after)) > APART_MAX_S:
        raise ClockApart(
            f"{_words(apart_s)}, and at most {APART_MAX_S:g} s are allowed: set both clocks by NTP, then start again"
        )


@dataclass(slots=True)
class ClockWatch:
    """Warns once when the database's clock and ours begin to differ, and again after they agreed."""

    _has_warned: bool = False

    def note(self, apart_s: float) -> None:
        is_apart = abs(apart_s) > APART_WARN_S
        if is_apart and not self._has_warned:
            _log.warning("%s: windows close and signatures expire by these clocks; set both by NTP", _words(apart_s))
        self._has_warned = is_apart


def _words(apart_s: float) -> str:
    side = "behind" if apart_s > 0 else "ahead of"
    return f"this machine's clock is {abs(apart_s):.1f} s {side} the database's"


class Uptime:
    """Since when a coordinator works on this database: each writes the time into one row every `SIGN_S`."""

    def __init__(self, database: Database, clock: Clock, outage_s: float = OUTAGE_S) -> None:
        self._db = database
        self._clock = clock
        self._outage_s = outage_s
        self._insert = sqlite.insert if database.is_sqlite else postgresql.insert
        self._last = float("-inf")  # sign that this coordinator knows of

    async def outage(self) -> Outage | None:
        """The time in which no coordinator could take reports, if it has not been recorded yet."""
        now = self._clock.now()
        if now - self._last <= self._outage_s:
            return None
        gap_s = self._now() - _SIGN.c.at
        async with self._db.reading() as tx:
            away_s = (await tx.execute(select(gap_s))).scalar_one_or_none()
        if away_s is None:
            return None
        self._last = max(self._last, now - away_s)
        return Outage(now - away_s, now) if away_s > self._outage_s else None

    async def sign(self) -> None:
        """Write a sign of life unless the last one is fresh. Call it after all runs have stored an outage."""
        now = self._clock.now()
        if now - self._last < SIGN_S:
            return
        statement = self._insert(_SIGN).values(id=_ID, at=self._now())
        latest = func.max if self._db.is_sqlite else func.greatest
        later = {"at": latest(_SIGN.c.at, statement.excluded.at)}
        async with self._db.writing("sign_of_life") as tx:
            await tx.execute(statement.on_conflict_do_update(index_elements=["id"], set_=later))
        self._last = now

    def _now(self) -> ColumnElement[float]:
        """The time on the clock that all coordinators of this database share."""
        return literal(self._clock.now()) if self._db.is_sqlite else database_now()
