"""The member lists that runs are bound to, as far as operators have given them."""

from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from umbel.aggregation.trust.members import MemberList, SignedMembers, members_bytes, read_members
from umbel.aggregation.types import RunId
from umbel.server.store import tables
from umbel.server.store.database import Database
from umbel.server.store.tables import table_of

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
        """The same in an open transaction."""
        await tx.execute(self._insert, [{"run": run, "text": members_bytes(signed).decode()}])

    async def of(self, run: RunId) -> MemberList | None:
        """The list that was given for a run; None if there is none."""
        async with self._db.reading() as tx:
            text = (await tx.scalars(select(_LIST.c.text).where(_LIST.c.run == run))).one_or_none()
        return None if text is None else read_members(text.encode()).list
