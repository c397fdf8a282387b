"""The coordinator processes that share one database: who lives, and who does which job.

Each replica lets a counter in its row grow. The others look at it, every `BEAT_S`: one that has stood still for
`DEAD_AFTER_LOOKS` looks in a row is taken for dead, and its jobs are free. Looks are counted, not seconds: a replica
that was itself stopped, or cut off from the database, has not looked meanwhile, and takes nobody for dead. None of this
depends on clocks that agree; other things do, so each look also compares this machine's with the database's. A replica
that was taken for dead by mistake does no harm: whatever two replicas do at once is decided under the lock of the run's
row.
"""

import asyncio
import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import delete, insert, select, update
from sqlalchemy.dialects import postgresql

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


def closing_job(round_id: int) -> str:
    """The job of making a closed round's model. Its lease goes when the round ends, whoever had it."""
    return f"close.{round_id}"


@dataclass(slots=True)
class _WatchedReplica:
    """A replica as it was last seen: its counter, and for how many looks that has stood still."""

    beat: int
    stood_still: int = 0


class Replicas:
    """This replica among the others. `id`: its name, new with every start. `is_alone`: no other can be there."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self.id = secrets.token_hex(8)
        self.is_alone = database.is_exclusive
        self._db = database
        self._clock = clock
        self._watched: dict[str, _WatchedReplica] = {}
        self._gone: set[str] = set()
        self._n_looks = 0
        self._clock_watch = ClockWatch()
        self._first_named: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Enter the list; where only one process can work on the database, all others on it are dead."""
        async with self._db.writing("enter_replica") as tx:
            if self.is_alone:
                await tx.execute(delete(_REPLICA))
                await tx.execute(delete(_LEASE))
            await tx.execute(insert(_REPLICA).values(id=self.id, beat=0, started_at=self._clock.now()))
        if not self.is_alone:
            await self._look()
            self._task = asyncio.create_task(self._keep_beating(), name="heartbeat")

    async def close(self) -> None:
        """Leave the list, so that others take over at once."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        async with self._db.writing("leave_replica") as tx:
            await tx.execute(delete(_LEASE).where(_LEASE.c.replica == self.id))
            await tx.execute(delete(_REPLICA).where(_REPLICA.c.id == self.id))

    def is_alive(self, replica: str) -> bool:
        """Whether a replica may still be at work, as far as this one has seen."""
        if replica == self.id:
            return True
        if (watched := self._watched.get(replica)) is not None:
            return watched.stood_still < DEAD_AFTER_LOOKS
        if self.is_alone or replica in self._gone:
            return False
        # Its name stands in a row and it is not in the list: it began a moment ago, or the next looks will tell.
        return self._n_looks < self._first_named.setdefault(replica, self._n_looks) + 2

    def others(self) -> tuple[str, ...]:
        """The other replicas that live."""
        return tuple(sorted(replica for replica in self._watched if self.is_alive(replica)))

    async def take(self, job: str) -> bool:
        """Whether this replica has the job: it had it, nobody has, or who had it is dead."""
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
            _log.warning("job %s: taken over from replica %s, which is gone", job, holder)
            return True

    async def _keep_beating(self) -> None:
        while True:
            try:
                await self._beat()
                await self._look()
            except DatabaseAway:
                pass  # told once, for all that asks
            except Exception:
                _log.exception("no heartbeat could be stored; trying again")
            await asyncio.sleep(BEAT_S)

    async def _beat(self) -> None:
        async with self._db.writing("beat") as tx:
            found = await tx.execute(update(_REPLICA).where(_REPLICA.c.id == self.id).values(beat=_REPLICA.c.beat + 1))
            if not found.rowcount:
                await tx.execute(insert(_REPLICA).values(id=self.id, beat=1, started_at=self._clock.now()))
            dead = [replica for replica in self._watched if self._is_long_dead(replica)]
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
                watched.stood_still += 1
        self._gone = (self._gone | self._watched.keys()) - found.keys()
        for replica in self._watched.keys() - found.keys():
            del self._watched[replica]

    def _is_long_dead(self, replica: str) -> bool:
        """Long enough that nobody wonders any more; its row is clutter."""
        return self._watched[replica].stood_still > _FORGET_AFTER_LOOKS
