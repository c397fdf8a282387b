"""A cohort in a secure round without a machine around it, each phase at once: for the benchmarks.

All clients share one reading of the roster, or a cohort of 300 would be some 90,000 signatures.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from umbel.aggregation.secagg.client import Random, SecureClient
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.coordinator import SecureCoordinator
from umbel.aggregation.secagg.messages import ShareKeys
from umbel.aggregation.trust.public_keys import public_key_text
from umbel.aggregation.types import RunId
from umbel.sim.secure.rounds import client_name

_OPENING, _SHA256 = bytes(32), "ab" * 32


@dataclass(slots=True)
class Advertised:
    """A cohort that has advertised its keys.

    `clients`: by index. `party`: the coordinator, whose roster is closed. `dealt`: the ShareKeys messages, once shared.
    """

    clients: Sequence[SecureClient]
    party: SecureCoordinator
    dealt: Mapping[int, ShareKeys] = field(default_factory=dict[int, ShareKeys])

    @property
    def roster(self) -> bytes:
        return self.party.roster()

    def share(self) -> None:
        """Every client shares its keys; none has its inbox yet."""
        self.dealt = {i: self.party.read_shares(i, client.share(self.roster)) for i, client in enumerate(self.clients)}
        self._load(self.party)

    def another_coordinator(self, inputs: Iterable[int]) -> SecureCoordinator:
        """A coordinator of the same attempt, to which nothing is revealed yet. `inputs`: who is in the sum."""
        party = SecureCoordinator(self.party.context, _OPENING)
        party.close_roster(self.party.session.adverts.values())
        self._load(party)
        party.close_inputs(inputs)
        return party

    def _load(self, party: SecureCoordinator) -> None:
        party.close_shares(self.dealt)
        party.load_shares(self.dealt)


def advertised(n: int, random: Random) -> Advertised:
    """A cohort of n clients, each of which has made its keys."""
    identities = [Ed25519PrivateKey.from_private_bytes(random(32)) for _ in range(n)]
    keys = (public_key_text(identity.public_key().public_bytes_raw()) for identity in identities)
    cohort = tuple((client_name(index), key) for index, key in enumerate(keys))
    opened = hashlib.sha256(_OPENING).hexdigest()
    context = Context(RunId("bench"), 1, 1, "0f" * 16, _SHA256, _SHA256, _SHA256, "", cohort, 3, opened, window_s=600.0)
    party = SecureCoordinator(context, _OPENING)
    clients = [
        SecureClient(context, index, identity, random, read_roster=lambda _context, _roster: party.session)
        for index, identity in enumerate(identities)
    ]
    party.close_roster(party.check_keys(index, client.advertise()) for index, client in enumerate(clients))
    return Advertised(clients, party)
