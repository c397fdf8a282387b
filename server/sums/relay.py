"""What clients reveal, on its way from the replica that they reached to the one that unmasks.

A revealed share must not be stored where it can be read, and a client may reach any replica. So the one that closes the
round makes a key pair in memory and publishes the public half; the others seal to it what they have heard and checked
(`umbel.aggregation.secagg.crypto.relayed`), and it takes that out of the database. It signs the key with the audit key,
which all replicas have (`keys.py`); to one that is not signed nothing is handed over. A key dies with its replica:
the next one publishes another, and what was heard is sealed again, to that. What only a dead replica had heard its
client sends again, as it got no answer. Whoever reads the database, or a copy of it, learns no share. Whoever writes to
it can put in another key, and hold up the round by that, but learns none either without the file of the audit key.
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
    """What this replica has heard in one attempt, and its key if it is the one that unmasks."""

    def __init__(self, store: RelayStore, audit_key: AuditKey, round_id: int, session: Session) -> None:
        self._store = store
        self._audit_key = audit_key
        self._round_id = round_id
        self._session = session
        self._heard: dict[int, bytes] = {}
        self._sealed_to: dict[int, bytes] = {}
        self._own: KeyPair | None = None
        self._published: PublishedKey | None = None  # the public half of `_own`, as it should stand in the database
        self._has_warned = False

    def hear(self, index: int, message: bytes) -> None:
        """Keep an Unmasking message that was checked: as long as the attempt lasts, it may be needed elsewhere."""
        self._heard[index] = message

    async def hand_over(self) -> None:
        """Give what was heard here to the replica that unmasks, unless that has it, or its key is none of a replica."""
        if not self._heard or (published := await self._store.published(self._round_id)) is None:
            return
        key = published.key
        due = [index for index in self._heard if self._sealed_to.get(index) != key]
        if not due or not self._is_of_a_replica(published):
            return
        names = self._session.context.names
        sealed = {
            names[index]: seal_relayed(key, self._session.digest, index, self._heard[index], os.urandom)
            for index in due
        }
        if await self._store.put(self._round_id, key, sealed):
            self._sealed_to.update(dict.fromkeys(due, key))

    async def collect(self) -> Mapping[int, bytes]:
        """What others have handed over since, by index; for the replica that closes the round."""
        if self._own is None or await self._store.published(self._round_id) != self._published:
            # Never a key that was published before: to that, others may think that they have sealed already.
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
        """Whether a replica has published this key, in this attempt. If not, it is told once."""
        try:
            self._audit_key.verify_relay_key(self._session.digest, published.key, published.signature)
        except ForgedRelayKey as error:
            if not self._has_warned:
                self._has_warned = True
                run, number = self._session.context.run, self._session.context.round
                _log.error("run %s, round %d: the clients' shares could not be handed over: %s", run, number, error)
            return False
        return True
