"""The member lists that runs are bound to, as far as operators have given them: who may wait for work in such a run.

What a list is worth, sites judge for themselves; here it keeps cohorts from being drawn that all of them would decline.
"""

from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from umbel.aggregation.run.bound_list import named_list
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.trust.members import MemberList, SignedMembers, members_bytes, read_members
from umbel.aggregation.types import RunId
from umbel.server.clock import Clock
from umbel.server.store import tables
from umbel.server.store.database import Database
from umbel.server.store.tables import table_of

LOOK_AGAIN_S = 5.0
"""A list that another replica was given counts here so many seconds later, at the latest."""
_LIST = table_of(tables.MemberListRow)


class MemberListStore:
    """One row for each run that has been given its list. It never changes, for the run file names it by its hash."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._insert = (sqlite.insert if database.is_sqlite else postgresql.insert)(_LIST).on_conflict_do_nothing()

    async def add(self, run: RunId, signed: SignedMembers) -> None:
        """Keep the list of a run that is stored already."""
        async with self._db.writing("add_member_list") as tx:
            await self.write(tx, run, signed)

    async def write(self, tx: AsyncConnection, run: RunId, signed: SignedMembers) -> None:
        """The same in a transaction that somebody else has begun."""
        await tx.execute(self._insert, [{"run": run, "text": members_bytes(signed).decode()}])

    async def of(self, run: RunId) -> MemberList | None:
        """The list that a run was given; None if it was given none."""
        async with self._db.reading() as tx:
            text = (await tx.scalars(select(_LIST.c.text).where(_LIST.c.run == run))).one_or_none()
        return None if text is None else read_members(text.encode()).list


class RunMembers:
    """Who may wait in one run, as this replica knows it."""

    def __init__(self, store: MemberListStore, file: RunFile, clock: Clock) -> None:
        self._store = store
        self._run = RunId(file.name)
        self._is_bound = bool(named_list(file))
        self._clock = clock
        self._known: MemberList | None = None
        self._looked_at = float("-inf")

    async def list(self) -> MemberList | None:
        """The run's member list; None if all may wait, for the run is bound to none, or nobody has given it."""
        now = self._clock.now()
        if self._known is None and self._is_bound and not 0 <= now - self._looked_at < LOOK_AGAIN_S:
            found, self._looked_at = await self._store.of(self._run), now
            self._known = self._known or found  # it may have been given meanwhile
        return self._known

    async def give(self, signed: SignedMembers) -> bool:
        """From now on only these may wait; whether that is news. The list must be the one that the run file names."""
        self._looked_at = float("-inf")
        if await self.list() is not None:
            return False
        await self._store.add(self._run, signed)
        self._known = signed.list
        return True
