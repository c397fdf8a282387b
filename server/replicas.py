"""The coordinator processes that share one database: who lives, and who does which job.

Each replica lets a counter in its row grow. The others watch it: one that stands still for `DEAD_AFTER_S`, by the clock
of who watches, is taken for dead, and its jobs are free. Nothing depends on clocks that agree. A replica that was taken
for dead by mistake does no harm: whatever two replicas do at once is decided under the lock of the run's row.
"""

import asyncio
import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import delete, insert, select, update

from umbel.server import tables
from umbel.server.clock import Clock
from umbel.server.database import Database
from umbel.server.tables import table_of

_log = logging.getLogger(__name__)
BEAT_S = 0.5
DEAD_AFTER_S = 2.0
_REPLICA, _LEASE = table_of(tables.Replica), table_of(tables.Lease)


@dataclass(slots=True)
class _Watched:
    beat: int
    since: float


class Replicas:
    """This replica among the others. `id`: its name, new with every start. `is_alone`: no other can be there."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self.id = secrets.token_hex(8)
        self.is_alone = database.is_exclusive
        self._db = database
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
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
        watched = self._watched.get(replica)
        return watched is not None and self._monotonic() - watched.since < DEAD_AFTER_S

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
                await tx.execute(insert(_LEASE).values(job=job, replica=self.id))
            else:
                await tx.execute(update(_LEASE).where(_LEASE.c.job == job).values(replica=self.id))
                _log.warning("job %s: taken over from replica %s, which is gone", job, holder)
            return True

    async def give_up(self, job: str) -> None:
        """Let go of a job, done or not."""
        if self.is_alone:
            return
        async with self._db.writing("give_up_lease") as tx:
            await tx.execute(delete(_LEASE).where(_LEASE.c.job == job, _LEASE.c.replica == self.id))

    async def _keep_beating(self) -> None:
        while True:
            try:
                await self._beat()
                await self._look()
            except Exception:
                _log.exception("no heartbeat could be stored; trying again")
            await asyncio.sleep(BEAT_S)

    async def _beat(self) -> None:
        async with self._db.writing("beat") as tx:
            found = await tx.execute(update(_REPLICA).where(_REPLICA.c.id == self.id).values(beat=_REPLICA.c.beat + 1))
            if not found.rowcount:  # type: ignore[attr-defined]  # of an update
                await tx.execute(insert(_REPLICA).values(id=self.id, beat=1, started_at=self._clock.now()))
            dead = [replica for replica in self._watched if self._is_long_dead(replica)]
            if dead:
                await tx.execute(delete(_REPLICA).where(_REPLICA.c.id.in_(dead)))

    async def _look(self) -> None:
        async with self._db.reading() as tx:
            rows = (await tx.execute(select(_REPLICA.c.id, _REPLICA.c.beat))).all()
        now, found = self._monotonic(), {row.id: row.beat for row in rows if row.id != self.id}
        for replica, beat in found.items():
            watched = self._watched.get(replica)
            if watched is None or watched.beat != beat:
                self._watched[replica] = _Watched(beat, now)
        for replica in self._watched.keys() - found.keys():
            del self._watched[replica]

    def _is_long_dead(self, replica: str) -> bool:
        """Long enough that nobody wonders any more; its row is clutter."""
        return self._monotonic() - self._watched[replica].since > 100 * DEAD_AFTER_S

    def _monotonic(self) -> float:
        return asyncio.get_running_loop().time()
