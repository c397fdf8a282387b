"""Enrolled clients: every query on them, in named short transactions; and those that a run lacks.

`enrolments.py` adds clients, and `admission.py` stores their requests' nonces. Any number of replicas share the
database. A client's key never changes, so it is kept in memory; `refresh` finds the clients that another replica
revoked.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select, update

from umbel.aggregation.errors import BadSignature
from umbel.aggregation.round.states import Closing, Training
from umbel.aggregation.run.records import Absent, AbsentClient
from umbel.aggregation.trust.signatures import Check, Claims, Target
from umbel.aggregation.types import ClientId
from umbel.server import journal
from umbel.server.devices.admission import Admission, Signed
from umbel.server.devices.enrolments import Enrolments
from umbel.server.devices.waiting import FLEET_HELD_MAX
from umbel.server.problems import client_removed
from umbel.server.store import tables
from umbel.server.store.batches import Batches
from umbel.server.store.database import Database
from umbel.server.store.stored import LiveRun
from umbel.server.store.tables import table_of
from umbel.server.store.waiters import FleetMember, WaiterStore

_CLIENT = table_of(tables.ClientRow)
_KNOWN_MAX = 100_000
_LOOK_BACK_S = 600.0
"""Replicas' clocks differ, and a revocation is dated before its transaction ends: `refresh` looks that far back."""
TIER_LABEL = "tier"
_NOT_SIGNED = (
    "the signature does not verify with the key of a client named {!r}: if no such client is enrolled here, enrol it "
    "with a token; otherwise check that no proxy changes the method, path or query"
)
NAMED_MAX = 5


@dataclass(frozen=True, slots=True)
class KnownClient:
    """An enrolled client."""

    id: str
    public_key: bytes
    tier: str
    """The label `tier` that its token binds, or the empty string; a client's own label does not count."""
    is_name_bound: bool
    """Whether its token binds its name."""
    is_removed: bool


@dataclass(frozen=True, slots=True)
class ClientView:
    """A client as the operator sees it. Times in Unix seconds.

    `labels`: the client's own and its token's; `bound_labels` and `is_name_bound`: what its token has bound.
    """

    id: str
    labels: dict[str, str]
    bound_labels: dict[str, str]
    is_name_bound: bool
    enrolled_at: float
    last_heard_at: float
    revoked_at: float | None


class Registry:
    """The enrolled clients. `enrolments` adds new ones."""

    def __init__(self, database: Database, waiters: WaiterStore) -> None:
        self._db = database
        self._admission = Admission(database, waiters)
        self._known: dict[str, KnownClient] = {}
        self._revoked: set[str] = set()  # as far as this replica knows; refuses requests that were under way
        self._looked_at: float | None = None
        self._lookups: Batches[str, KnownClient | None] = Batches(self._look_up)
        self.enrolments = Enrolments(database, self._admission)
        # Its private key is dropped here, so nobody can sign with it.
        self._nobodys_key = Ed25519PrivateKey.generate().public_key().public_bytes_raw()

    async def close(self) -> None:
        """Store the times of last contact that are not stored yet."""
        await self._admission.store_heard()

    async def client(self, name: str) -> KnownClient | None:
        """An enrolled client; None for one that was removed."""
        found = self._known.get(name) or await self._lookups.do(name)
        return None if found is None or found.is_removed or name in self._revoked else found

    async def keys(self, names: Sequence[str]) -> dict[str, bytes]:
        """The public keys of enrolled clients, including those that were removed since."""
        found = {name: self._known.get(name) or await self._lookups.do(name) for name in names}
        return {name: one.public_key for name, one in found.items() if one is not None}

    async def signer(self, claims: Claims, target: Target, now: float, check: Check | None = None) -> KnownClient:
        """The client that signed a request. `admit` checks the nonce. `check`: as in `Claims.verify`.

        Raises a `SignatureRefused`, or `Refused` for a client that was removed. An unknown name gets the same answer
        after the same work as a name with another key, so that nobody can find out which clients are enrolled.
        """
        cached = self._known.get(claims.key_id)
        client = cached or await self._lookups.do(claims.key_id)
        try:
            claims.verify(client.public_key if client else self._nobodys_key, target, now, check)
        except BadSignature:
            if cached is not None:
                await self._lookups.do(claims.key_id)  # takes as long as for an unknown name
            raise BadSignature(_NOT_SIGNED.format(claims.key_id)) from None
        assert client is not None, "nobody signs with nobody's key"
        if client.is_removed:
            raise client_removed()
        self.refuse_revoked(client.id)
        return client

    async def _look_up(self, names: Sequence[str]) -> Sequence[KnownClient | None]:
        clients = tables.ClientRow
        columns = select(
            clients.id, clients.public_key, clients.bound_labels, clients.is_name_bound, clients.revoked_at
        )
        async with self._db.reading() as tx:
            rows = (await tx.execute(columns.where(clients.id.in_(names)))).all()
        found = {
            row.id: KnownClient(
                row.id, row.public_key, _tier(row.bound_labels), row.is_name_bound, row.revoked_at is not None
            )
            for row in rows
        }
        if len(self._known) + len(found) > _KNOWN_MAX:
            self._known.clear()
        self._known.update(
            (name, one) for name, one in found.items() if not one.is_removed and name not in self._revoked
        )
        return [found.get(name) for name in names]

    async def admit(self, signed: Signed) -> None:
        """Store the nonce of a request until its signature expires.

        Raises `ReplayedNonce`, or `Refused` if the client was revoked meanwhile.
        """
        await self._admission.admit(signed)
        self.refuse_revoked(signed.claims.key_id)

    async def forget_nonces(self, now: float) -> None:
        """Drop expired nonces. Call it about every minute."""
        await self._admission.forget_nonces(now)
        await self._admission.store_heard()

    async def refresh(self, now: float) -> tuple[str, ...]:
        """The clients that other replicas revoked since the last call. Call it about twice a second."""
        clients, since = tables.ClientRow, min(now, self._looked_at or now) - _LOOK_BACK_S
        async with self._db.reading() as tx:
            found = await tx.scalars(select(clients.id).where(clients.revoked_at > since))
            news = tuple(name for name in found if name not in self._revoked)
        self._looked_at = now
        for name in news:
            self._forget(name)
        return news

    def _forget(self, name: str) -> None:
        self._revoked.add(name)
        self._known.pop(name, None)

    def refuse_revoked(self, name: str) -> None:
        """Raise `Refused` if this client was revoked while its request was under way."""
        if name in self._revoked:
            raise client_removed()

    async def clients(self) -> tuple[ClientView, ...]:
        async with self._db.reading() as tx:
            rows = (await tx.execute(select(_CLIENT).order_by(_CLIENT.c.id))).all()
        return tuple(
            ClientView(
                row.id,
                json.loads(row.labels),
                json.loads(row.bound_labels),
                row.is_name_bound,
                row.enrolled_at,
                max(row.last_heard_at, self._admission.heard_at(row.id)),
                row.revoked_at,
            )
            for row in rows
        )

    async def revoke(self, name: str, now: float) -> bool:
        """Take a client's right to speak; False if there is no such client."""
        async with self._db.writing("revoke") as tx:
            mine = _CLIENT.c.id == name
            row = (await tx.execute(select(_CLIENT.c.revoked_at).where(mine).with_for_update())).one_or_none()
            if row is None:
                return False
            is_new = row.revoked_at is None
            if is_new:
                await tx.execute(update(_CLIENT).where(mine).values(revoked_at=now))
        self._forget(name)
        if is_new:
            journal.revoked(name)
        return True


def _tier(labels: str) -> str:
    return str(json.loads(labels).get(TIER_LABEL, ""))


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
            fleet = await self._waiters.fleet(live.name, now, FLEET_HELD_MAX + 1)
            if len(fleet) <= FLEET_HELD_MAX:  # a larger fleet is sent away between rounds, so most of it is absent
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
