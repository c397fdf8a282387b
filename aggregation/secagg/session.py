"""A secure round once its roster is closed, as both ends know it: the graph, the threshold t, and what is signed."""

import base64
import hashlib
import hmac
from collections.abc import Collection, Mapping
from functools import cached_property

from umbel.aggregation.phrases import agreeing, counted
from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.crypto.curve import require_keys
from umbel.aggregation.secagg.crypto.derive import PROTOCOL, session_digest, set_digest
from umbel.aggregation.secagg.crypto.signing import Label, verify
from umbel.aggregation.secagg.errors import BadKey, Disagreement, ForgedMessage, SecAggError, TooFew
from umbel.aggregation.secagg.graph import Graph, graph_of
from umbel.aggregation.secagg.messages import AdvertiseKeys, Indices, Roster, ShareKeys
from umbel.aggregation.secagg.parameters import Parameters, parameters_for, roster_min, survivors_min


class Session:
    """One attempt from its roster on. `adverts`: of U1, by index, with checked signatures."""

    def __init__(self, context: Context, opening: bytes, adverts: Mapping[int, AdvertiseKeys]) -> None:
        self.context = context
        self.adverts = dict(sorted(adverts.items()))
        self.opening = opening
        self.parameters: Parameters = parameters_for(len(self.adverts), n_invited=len(context.cohort))
        rows = ((one.index, one.channel_key, one.mask_key, one.signature) for one in self.adverts.values())
        self.digest = session_digest(context.digest, rows, self.parameters.k, self.parameters.t)
        self._neighbours: dict[int, Indices] = {}

    @classmethod
    def of_roster(cls, context: Context, roster: Roster) -> "Session":
        """The session of a roster from the coordinator.

        Raises `TooFew` for a roster below the context's minimum, or with too many possibly corrupt clients,
        `Disagreement` for an opening that does not match the commitment, `BadKey`, `ForgedMessage`.
        """
        least = max(context.minimum, roster_min(len(context.cohort)))
        if len(roster.adverts) < least:
            raise TooFew(f"only {counted(len(roster.adverts), 'client')} advertised keys; at least {least} are needed")
        if not hmac.compare_digest(hashlib.sha256(roster.opening).hexdigest(), context.opening_commitment):
            raise Disagreement(
                "the opening in the roster does not match the commitment in the assignment: the coordinator changed "
                "the random bytes that decide which clients are neighbours"
            )
        for advert in roster.adverts:
            check_advert(context, advert)
        require_keys(key for advert in roster.adverts for key in (advert.channel_key, advert.mask_key))
        return cls(context, roster.opening, {one.index: one for one in roster.adverts})

    @classmethod
    def of_message(cls, context: Context, roster: bytes) -> "Session":
        """`of_roster` from the message's bytes. Raises `MalformedMessage`, too."""
        return cls.of_roster(context, Roster.decode(roster, len(context.cohort)))

    @property
    def threshold(self) -> int:
        """t: the number of shares that restore a secret, and of signatures that make an agreement."""
        return self.parameters.t

    @property
    def survivors_min(self) -> int:
        """The fewest clients in a sum; in a sparse graph more than t, which counts neighbours."""
        return survivors_min(len(self.adverts), n_invited=len(self.context.cohort))

    @cached_property
    def _graph(self) -> Graph:
        # No client can choose it, and the coordinator only by leaving clients out: see `parameters.py`.
        parts = (
            PROTOCOL,
            b"graph",
            self.context.digest,
            self.opening,
            *(one.encode() for one in self.adverts.values()),
        )
        return graph_of(len(self.adverts), self.parameters.k, hashlib.sha256(b"".join(parts)).digest())

    @cached_property
    def _listed(self) -> Indices:
        return tuple(self.adverts)

    @cached_property
    def _places(self) -> Mapping[int, int]:
        return {index: place for place, index in enumerate(self.adverts)}

    def neighbours(self, index: int) -> Indices:
        """The clients that share a mask with this one, ascending."""
        if index not in self._neighbours:
            places = self._graph.neighbours(self._places[index])
            self._neighbours[index] = tuple(sorted(self._listed[place] for place in places))
        return self._neighbours[index]

    def holders(self, index: int) -> Indices:
        """The holders of this client's secrets, whose secrets it holds too: its neighbours and itself, ascending."""
        return tuple(sorted((*self.neighbours(index), index)))

    def set_digest(self, indices: Collection[int]) -> bytes:
        return set_digest(self.digest, indices)

    def roster(self) -> Roster:
        return Roster(self.opening, tuple(self.adverts.values()))

    def check_shares(self, message: ShareKeys) -> None:
        """Raise `ForgedMessage` unless the dealer has signed the message."""
        check_signature(self.context, message.index, Label.SHARE_KEYS, self.digest, message.payload, message.signature)

    def input_payload(self, shared: Collection[int], body_sha256: bytes) -> bytes:
        """What a client signs with its masked vector: the clients that share its masks, and the vector's hash."""
        return self.set_digest(shared) + body_sha256

    def consistency_payload(self, shared: Collection[int], inputs: Collection[int]) -> bytes:
        """What all clients sign before a share is revealed: the clients in U2, and those in the sum."""
        return self.set_digest(shared) + self.set_digest(inputs)

    def require_enough(self, index: int, indices: Collection[int], does: str, do: str) -> None:
        """Raise `TooFew` if no sum of these clients could be unmasked.

        `index`: of the client that checks. `does`, `do`: what the clients did, in the singular and the plural.
        """
        least = max(self.context.minimum, self.survivors_min)
        if len(indices) < least:
            raise TooFew(
                f"only {counted(len(indices), f'client {does}', f'clients {do}')}; at least {least} are needed"
            )
        self.require_threshold(len(set(indices).intersection(self.holders(index))), does, do)

    def require_threshold(self, n_holders: int, does: str, do: str) -> None:
        """Raise `TooFew` unless at least t of a client's holders did this."""
        if n_holders < self.threshold:
            who = counted(n_holders, "client that holds this client's shares", "clients that hold this client's shares")
            raise TooFew(f"only {who} {agreeing(n_holders, does, do)}; {self.threshold} are needed")


def check_advert(context: Context, advert: AdvertiseKeys) -> None:
    """Raise `BadKey` for impossible keys, `ForgedMessage` unless the client of the cohort has signed them."""
    try:
        require_keys((advert.channel_key, advert.mask_key))
    except BadKey as error:
        raise BadKey(f"{name_of(context, advert.index)} advertised an invalid key: {error}") from error
    check_signature(context, advert.index, Label.ADVERTISE_KEYS, context.digest, advert.payload, advert.signature)


def check_signature(
    context: Context, index: int, label: Label, digest: bytes, payload: bytes, signature: bytes
) -> None:
    """Raise `ForgedMessage`, with the client's name, unless its identity key has signed the payload."""
    name = name_of(context, index)
    try:
        verify(base64.b64decode(context.cohort[index][1]), label, digest, payload, signature)
    except ForgedMessage as error:
        raise ForgedMessage(f"the message of {name} is not signed with the identity key of {name}") from error


def name_of(context: Context, index: int) -> str:
    """A client's name. Raises `SecAggError` for an index beyond the cohort."""
    if not 0 <= index < len(context.cohort):
        raise SecAggError(f"there is no client {index}: the cohort has {len(context.cohort)} clients, numbered from 0")
    return context.cohort[index][0]
