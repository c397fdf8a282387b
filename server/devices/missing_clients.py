"""The clients that a run lacks, for its operator: absent when a round opened, or refused at check-in."""

from collections.abc import Collection, Sequence

from sqlalchemy import delete, or_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from umbel.aggregation.round.states import Closing, Training
from umbel.aggregation.run.records import Absent, AbsentClient, TurnedAway
from umbel.aggregation.types import ClientId, RunId
from umbel.server.devices.pacing import HELD_MAX
from umbel.server.store import tables
from umbel.server.store.database import Database
from umbel.server.store.stored import LiveRun
from umbel.server.store.tables import table_of
from umbel.server.store.waiters import FleetMember, WaiterStore

NAMED_MAX = 5
KEPT_MAX = 100
SHOWN_MAX = 20
_SAME_AGAIN_S = 60.0  # the same reason of one client is written once a minute
_OTHER_AGAIN_S = 5.0  # and a changed reason once in five seconds
_KEPT_S = 7 * 86400.0
_AWAY, _WAITER = table_of(tables.TurnedAwayRow), table_of(tables.WaiterRow)


class AttendanceCheck:
    """Finds the absent clients of a run, once for each attempt at a round of training, soon after it has opened."""

    def __init__(self, waiters: WaiterStore) -> None:
        self._waiters = waiters
        self._checked_round = 0
        self._absent: Absent | None = None

    async def check(self, live: LiveRun, now: float) -> None:
        """Find the absent clients if the round is open and was not checked yet."""
        state = live.state
        if live.round_id == self._checked_round or not isinstance(state, Training | Closing):
            return
        absent = None
        if state.plan.task.makes_model:  # a canary and an evaluation leave most clients out on purpose
            fleet = await self._waiters.fleet(live.name, now, HELD_MAX + 1)
            if len(fleet) <= HELD_MAX:  # a larger fleet is sent away between rounds, so most of it is absent
                absent = absent_from(fleet, state.cohort, state.opened_at, live.run.file.coverage.sites)
        self._checked_round, self._absent = live.round_id, absent

    def absent_from(self, round_id: int) -> Absent | None:
        """The clients that were absent from this attempt; None if that is unknown."""
        return self._absent if round_id == self._checked_round else None


def absent_from(
    fleet: Sequence[FleetMember], cohort: Collection[ClientId], opened_at: float, sites: Collection[ClientId]
) -> Absent:
    """The clients that are not in the cohort, did not wait when the round opened, and did not come since."""
    missing = [one for one in fleet if one.client not in cohort and max(one.until, one.seen_at) < opened_at]
    by_weight = sorted(missing, key=lambda one: (one.client not in sites, -one.sample_count, one.client))
    named = tuple(AbsentClient(one.client, one.sample_count, one.heard_at) for one in by_weight[:NAMED_MAX])
    return Absent(len(missing), sum(one.sample_count for one in missing), named)


class TurnedAwayStore:
    """The last refusal of each client at check-in. The newest `KEPT_MAX` of each run are kept."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._insert = sqlite.insert if database.is_sqlite else postgresql.insert

    async def note(self, run: RunId, client: ClientId, reason: str, now: float, in_place_of: str = "") -> bool:
        """Store a refusal in place of this client's last one. False if one was stored a moment ago.

        `in_place_of`: a less detailed reason for the same refusal, which this one may replace at once.
        """
        mine = (_AWAY.c.run == run, _AWAY.c.client == client)
        is_same = (_AWAY.c.reason == reason) & (_AWAY.c.at > now - _SAME_AGAIN_S)
        is_other = (_AWAY.c.reason != in_place_of) & (_AWAY.c.at > now - _OTHER_AGAIN_S)
        fresh = select(_AWAY.c.at).where(*mine, or_(is_same, is_other))
        async with self._db.reading() as tx:
            if (await tx.execute(fresh)).first() is not None:
                return False
        row = {"run": run, "client": client, "reason": reason, "at": now}
        upsert = self._insert(_AWAY).on_conflict_do_update(
            index_elements=["run", "client"], set_={"reason": reason, "at": now}
        )
        async with self._db.writing("note_turned_away") as tx:
            await tx.execute(upsert, [row])
            await _forget_oldest(tx, run)
        return True

    async def sweep(self, now: float) -> None:
        """Drop refusals older than a week."""
        async with self._db.writing("sweep_turned_away") as tx:
            await tx.execute(delete(_AWAY).where(_AWAY.c.at <= now - _KEPT_S))

    async def newest(self, run: RunId) -> tuple[TurnedAway, ...]:
        """Refusals of clients that were not admitted since, the newest first; at most `SHOWN_MAX`."""
        since = (_WAITER.c.run == _AWAY.c.run) & (_WAITER.c.client == _AWAY.c.client)
        query = (
            select(_AWAY)
            .outerjoin(_WAITER, since)
            .where(_AWAY.c.run == run, or_(_WAITER.c.seen_at.is_(None), _WAITER.c.seen_at < _AWAY.c.at))
            .order_by(_AWAY.c.at.desc(), _AWAY.c.client)
            .limit(SHOWN_MAX)
        )
        async with self._db.reading() as tx:
            return tuple(TurnedAway(row.client, row.reason, row.at) for row in await tx.execute(query))


async def _forget_oldest(tx: AsyncConnection, run: RunId) -> None:
    """Keep the newest only. Rows that another replica is writing are skipped, so that no replica waits for another."""
    newest_first = select(_AWAY.c.client).where(_AWAY.c.run == run).order_by(_AWAY.c.at.desc(), _AWAY.c.client)
    surplus = (await tx.scalars(newest_first.offset(KEPT_MAX).with_for_update(skip_locked=True))).all()
    if surplus:
        await tx.execute(delete(_AWAY).where(_AWAY.c.run == run, _AWAY.c.client.in_(surplus)))
