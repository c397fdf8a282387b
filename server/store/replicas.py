"""The coordinator processes that share one database: which are alive, which job each does, what they relay.

Each replica increments a counter in its own row. The others read it every `BEAT_S`. A replica whose counter has not
changed for `DEAD_AFTER_LOOKS` looks is considered dead, and its jobs are free. Looks are counted instead of seconds: a
replica that was stopped, or cut off from the database, does not look meanwhile, and considers nobody dead. So none of
this depends on synchronized clocks. Other parts do, so each look also compares this machine's clock with the
database's. A replica that is considered dead by mistake does no harm, because the lock of the run's row decides
between two replicas that do the same.
"""

import asyncio
import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import delete, insert, select, update
from sqlalchemy.dialects import postgresql

from umbel.aggregation.types import ClientId
from umbel.server.clock import Clock
from umbel.server.store import tables
from umbel.server.store.clocks import ClockWatch, ahead_s, database_now
from umbel.server.store.database import Database
from umbel.server.store.outage import DatabaseAway
from umbel.server.store.tables import table_of

_log = logging.getLogger(__name__)
BEAT_S = 0.5
DEAD_AFTER_LOOKS = 4
_FORGET_AFTER_LOOKS = 400
_REPLICA, _LEASE = table_of(tables.ReplicaRow), table_of(tables.LeaseRow)
_RELAYED = table_of(tables.RelayedRevealRow)


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
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
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
                _log.exception("the heartbeat failed; retrying")
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
