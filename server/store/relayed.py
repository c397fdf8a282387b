"""What replicas hand to the one that unmasks a sum, as it stands in the database: its key, and what is sealed to it.

The key and its signature stand beside the lease of the round's closing, so they go with whoever had it. Nothing is
stored that is sealed to another key, and a new one takes away what was sealed to the one before. Locks are taken in one
order: the lease, then what is relayed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import delete, select, update
from sqlalchemy.dialects import postgresql

from umbel.aggregation.types import ClientId
from umbel.server.store import tables
from umbel.server.store.database import Database
from umbel.server.store.replicas import closing_job
from umbel.server.store.tables import table_of

_LEASE, _RELAYED = table_of(tables.LeaseRow), table_of(tables.RelayedRevealRow)


@dataclass(frozen=True, slots=True)
class PublishedKey:
    """A public key to seal to (32 bytes) and its signature (64), as they stand there: not verified."""

    key: bytes
    signature: bytes


class RelayStore:
    """Only where there may be other replicas, on PostgreSQL. `replica`: this one."""

    def __init__(self, database: Database, replica: str) -> None:
        self._db = database
        self._replica = replica

    async def published(self, round_id: int) -> PublishedKey | None:
        """The key of whoever closes the round; None while nobody does, or it has not published one."""
        query = select(_LEASE.c.relay_key, _LEASE.c.relay_signature).where(_LEASE.c.job == closing_job(round_id))
        async with self._db.reading() as tx:
            row = (await tx.execute(query)).one_or_none()
        return None if row is None or row.relay_key is None else PublishedKey(row.relay_key, row.relay_signature or b"")

    async def publish(self, round_id: int, new: PublishedKey) -> bool:
        """Have others seal to this new key; False if it is not this replica that closes the round."""
        mine = (_LEASE.c.job == closing_job(round_id), _LEASE.c.replica == self._replica)
        async with self._db.writing("publish_relay_key") as tx:
            values = {"relay_key": new.key, "relay_signature": new.signature}
            if not (await tx.execute(update(_LEASE).where(*mine).values(values))).rowcount:
                return False
            await tx.execute(delete(_RELAYED).where(_RELAYED.c.round_id == round_id))
            return True

    async def put(self, round_id: int, key: bytes, sealed: Mapping[ClientId, bytes]) -> bool:
        """Store what was sealed to `key`; False, and nothing, if that is no longer the key to seal to."""
        query = select(_LEASE.c.relay_key).where(_LEASE.c.job == closing_job(round_id))
        rows = [
            {"round_id": round_id, "client": client, "relay_key": key, "sealed": body}
            for client, body in sorted(sealed.items())
        ]
        async with self._db.writing("relay") as tx:
            if (await tx.execute(query.with_for_update(read=True))).scalar_one_or_none() != key:
                return False
            # A row that is there came from another replica, to which the client had spoken before.
            await tx.execute(postgresql.insert(_RELAYED).on_conflict_do_nothing(), rows)
            return True

    async def take(self, round_id: int, key: bytes) -> Mapping[ClientId, bytes]:
        """What has come in sealed to `key`, by client. It is not stored any more."""
        mine = (_RELAYED.c.round_id == round_id, _RELAYED.c.relay_key == key)
        query = select(_RELAYED.c.client, _RELAYED.c.sealed).where(*mine)
        async with self._db.writing("take_relayed") as tx:
            rows = (await tx.execute(query.with_for_update(skip_locked=True))).all()
            if rows:
                taken = _RELAYED.c.client.in_([row.client for row in rows])
                await tx.execute(delete(_RELAYED).where(*mine, taken))
        return {ClientId(row.client): row.sealed for row in rows}
