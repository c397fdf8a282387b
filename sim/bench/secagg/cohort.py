"""A cohort in a secure round without a machine around it, each phase at once: for the benchmarks.

All clients share one reading of the roster, or a cohort of 300 would be some 90,000 signatures.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from umbel.aggregation.secagg.client import Random, SecureClient
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.messages import AdvertiseKeys, Inbox, Roster, ShareKeys
from umbel.aggregation.secagg.session import Session
from umbel.aggregation.trust.public_keys import public_key_text
from umbel.aggregation.types import RunId
from umbel.sim.secure.rounds import client_name

_OPENING, _SHA256 = bytes(32), "ab" * 32


@dataclass(frozen=True, slots=True)
class Advertised:
    """A cohort that has advertised its keys. `clients`: by index, all of them before ShareKeys."""

    context: Context
    clients: Sequence[SecureClient]
    roster: bytes
    session: Session

    def shared(self) -> "Shared":
        """After ShareKeys: everybody has dealt, nobody has heard."""
        dealt = dict[int, ShareKeys]()
        for index, client in enumerate(self.clients):
            dealt[index] = ShareKeys.decode(client.share(self.roster), index, self.session.neighbours(index))
        return Shared(self, dealt)


@dataclass(frozen=True, slots=True)
class Shared:
    """A cohort that has shared its keys. `dealt`: the ShareKeys messages, by index."""

    advertised: Advertised
    dealt: dict[int, ShareKeys]

    def inbox(self, index: int) -> bytes:
        """What the coordinator has for a client: everybody's shares for it."""
        of_others = {dealer: one.dealt[index] for dealer, one in self.dealt.items() if index in one.dealt}
        of_others.pop(index)
        return Inbox(tuple(self.dealt), of_others).encode()


def advertised(n: int, random: Random) -> Advertised:
    """A cohort of n clients, each of whom has made its keys."""
    identities = [Ed25519PrivateKey.from_private_bytes(random(32)) for _ in range(n)]
    keys = (public_key_text(identity.public_key().public_bytes_raw()) for identity in identities)
    cohort = tuple((client_name(index), key) for index, key in enumerate(keys))
    opened = hashlib.sha256(_OPENING).hexdigest()
    context = Context(RunId("bench"), 1, 1, "0f" * 16, _SHA256, _SHA256, _SHA256, "", cohort, 3, opened, window_s=600.0)
    sessions = list[Session]()
    clients = [
        SecureClient(context, index, identity, random, read_roster=lambda _context, _roster: sessions[0])
        for index, identity in enumerate(identities)
    ]
    adverts = tuple(AdvertiseKeys.decode(client.advertise()) for client in clients)
    roster = Roster(_OPENING, adverts)
    sessions.append(Session.of_roster(context, roster))
    return Advertised(context, clients, roster.encode(), sessions[0])
