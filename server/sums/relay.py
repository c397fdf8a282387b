"""How revealed shares travel from the replica that received them to the replica that unmasks the sum.

A revealed share must not be stored in the clear, and a client may reach any replica. So the replica that closes the
round makes a key pair in memory and publishes the public key, signed with the audit key, which all replicas have
(`keys.py`). The other replicas seal the shares that they have received and checked to this key
(`umbel.aggregation.secagg.crypto.relayed`), and the closing replica takes them out of the database. Nothing is sealed
to a key without that signature.

A key is lost with its replica. The next replica publishes another key, and the shares are sealed again, to that. Shares
that only a dead replica had received are sent again by their clients, which got no answer.

A reader of the database, or of a copy of it, learns no share. An attacker who writes to the database can replace the
key, which delays the round, but learns no share without the file of the audit key.
"""

import logging
import os
from collections.abc import Mapping

from umbel.aggregation.secagg.crypto.curve import KEY_BYTES, KeyPair
from umbel.aggregation.secagg.crypto.sealed import open_relayed, seal_relayed
from umbel.aggregation.secagg.errors import BadShare
from umbel.aggregation.secagg.session import Session
from umbel.server.store.keys import AuditKey, ForgedRelayKey
from umbel.server.store.replicas import PublishedKey, RelayStore

_log = logging.getLogger(__name__)


class Relay:
    """The shares that this replica has received in one attempt, and its key if it unmasks the sum."""

    def __init__(self, store: RelayStore, audit_key: AuditKey, round_id: int, session: Session) -> None:
        self._store = store
        self._audit_key = audit_key
        self._round_id = round_id
        self._session = session
        self._received: dict[int, bytes] = {}
        self._sealed_to: dict[int, bytes] = {}  # the key that each client's shares were sealed to last
        self._own: KeyPair | None = None
        self._published: PublishedKey | None = None  # the public half of `_own`, as it should stand in the database
        self._has_warned = False

    def keep(self, index: int, message: bytes) -> None:
        """Keep a checked Unmasking message for the attempt, because another replica may need it."""
        self._received[index] = message

    async def hand_over(self) -> None:
        """Seal the shares received here to the key of the unmasking replica, unless they are sealed to it already."""
        if not self._received or (published := await self._store.published(self._round_id)) is None:
            return
        key = published.key
        due = [index for index in self._received if self._sealed_to.get(index) != key]
        if not due or not self._is_of_a_replica(published):
            return
        names = self._session.context.names
        sealed = {
            names[index]: seal_relayed(key, self._session.digest, index, self._received[index], os.urandom)
            for index in due
        }
        if await self._store.put(self._round_id, key, sealed):
            self._sealed_to.update(dict.fromkeys(due, key))

    async def collect(self) -> Mapping[int, bytes]:
        """Take the shares that other replicas have handed over since, by client index. For the closing replica."""
        if self._own is None or await self._store.published(self._round_id) != self._published:
            # A new key every time: other replicas seal to one key only once.
            own = KeyPair(os.urandom(KEY_BYTES))
            signature = self._audit_key.sign_relay_key(self._session.digest, own.public)
            self._published = PublishedKey(own.public, signature)
            self._own = own if await self._store.publish(self._round_id, self._published) else None
            return {}
        opened, context = dict[int, bytes](), self._session.context
        for client, sealed in (await self._store.take(self._round_id, self._own.public)).items():
            index = context.index_of(client)
            try:
                opened[index] = open_relayed(self._own, self._session.digest, index, sealed)
            except BadShare as error:
                _log.warning("the shares of %s that another replica received cannot be read: %s", client, error)
        return opened

    def _is_of_a_replica(self, published: PublishedKey) -> bool:
        """Whether a replica has published this key in this attempt. Logs the first key that fails."""
        try:
            self._audit_key.verify_relay_key(self._session.digest, published.key, published.signature)
        except ForgedRelayKey as error:
            if not self._has_warned:
                self._has_warned = True
                run, number = self._session.context.run, self._session.context.round
                _log.error(
                    "run %s, round %d: could not hand over the clients' shares to another replica: %s",
                    run,
                    number,
                    error,
                )
            return False
        return True
