"""Whether a client may wait for work in a run; if not, why, in words that its operator can act on.

Sites judge a member list for themselves. Here it keeps out clients whose cohort every site would decline.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from umbel.aggregation.errors import LayoutError
from umbel.aggregation.messages import CheckIn
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.tensors import TensorRules
from umbel.aggregation.run.file import RunFile
from umbel.aggregation.trust.members import MemberList, SignedMembers
from umbel.aggregation.trust.public_keys import public_key_text
from umbel.aggregation.types import ClientId, RunId
from umbel.server.clock import Clock
from umbel.server.devices.clients import Registry
from umbel.server.problems import Refused
from umbel.server.store.rounds import MemberListStore
from umbel.server.store.versions import ModelStore

LOOK_AGAIN_S = 5.0  # until a list that another replica was given counts here, at the latest
_WORDS_MAX = 300  # the client chooses the names of tensors


@dataclass(frozen=True, slots=True)
class Unfit:
    """Why a client may not wait for work."""

    refusal: Refused  # the answer
    in_place_of: str = ""  # the less detailed refusal that this one replaces


@dataclass(frozen=True, slots=True)
class RunModel:
    """What a client's model is compared with."""

    layout: Layout  # of the model itself
    rules: TensorRules | None  # the run file's, of what travels


async def unfit(
    registry: Registry,
    models: ModelStore,
    model: RunModel,
    sites: Collection[ClientId],
    members: MemberList | None,
    client: ClientId,
    message: CheckIn,
) -> Unfit | None:
    """Why this client may not wait in a run, or None if it may.

    `model`: the run's. `sites`: the clients that the run's coverage names; their names must be bound. `members`: the
    run's list; None if the run is open to all.
    """
    if (found := await stranger(registry, members, client)) is not None:
        return found
    if client in sites and not await _is_name_bound(registry, client):
        detail = (
            "this run's coverage names this client, but the token that it enrolled with binds no name. Take part in "
            "another run; or ask the operator to remove this client and to make a token for a new name. The coverage "
            "of the next run must then list the new name"
        )
        return Unfit(Refused("unbound-name", detail))
    if message.layout_digest != model.layout.digest:  # last, because the difference reveals the run's model
        return await _wrong_layout(models, model, message)
    return None


async def _is_name_bound(registry: Registry, client: ClientId) -> bool:
    known = await registry.client(client)
    return known is not None and known.is_name_bound


async def stranger(registry: Registry, members: MemberList | None, client: ClientId) -> Unfit | None:
    """Why this client may not wait in a run for `members` (None: for all clients), or None if it may.

    The key that it enrolled with must be the listed one, because every site checks the same of the cohort.
    """
    if members is None:
        return None
    known = await registry.client(client)
    listed, which = members.members.get(client), f"epoch {members.epoch} of the member list {members.name!r}"
    if known is not None and listed == public_key_text(known.public_key):
        return None
    if listed is None:
        detail = (
            f"this run is for the members of {which}, and {client!r} is not one of them. Take part in another "
            "run; or ask an officer to add its name and key (umbel fingerprint shows the key) to the next epoch "
            "(version) of the list. The next epoch needs a new run"
        )
    else:
        detail = (
            f"this run is for the members of {which}, and {client!r} is enrolled with another key than the list has. "
            "Start it with the state directory whose key is on the list (umbel fingerprint shows the key); or take "
            "part in another run; or ask an officer to put this key into the next epoch (version) of the list. The "
            "next epoch needs a new run"
        )
    return Unfit(Refused("not-a-member", detail))


async def _wrong_layout(models: ModelStore, model: RunModel, message: CheckIn) -> Unfit:
    layout, rules = model.layout, model.rules
    digests = f"its layout digest is {message.layout_digest[:12]}…, not {layout.digest[:12]}…"
    theirs = await models.layout(message.layout_digest) or await asyncio.to_thread(_layout_in, message)
    if theirs is None:
        # A client that has not heard the rules of the run applies them now. A second refusal is the operator's matter.
        return Unfit(_refusal(digests, rules, is_handshake=rules is not None))
    words = layout.difference(theirs)
    short = words if len(words) <= _WORDS_MAX else f"{words[:_WORDS_MAX]}…"
    return Unfit(_refusal(short, rules), _sentence(digests))


def _refusal(difference: str, rules: TensorRules | None, is_handshake: bool = False) -> Refused:
    return Refused("wrong-layout", _sentence(difference), tensors=rules, is_handshake=is_handshake)


def _sentence(difference: str) -> str:
    return f"this client's model does not fit the run's: {difference}; build the model that the run was created with"


def _layout_in(message: CheckIn) -> Layout | None:
    """The layout that a client has sent, or None if it sent no readable one."""
    try:
        return Layout.from_json(message.layout) if message.layout else None
    except LayoutError:
        return None


class RunMembers:
    """Who may wait in one run, as this replica knows it."""

    def __init__(self, store: MemberListStore, file: RunFile, clock: Clock) -> None:
        self._store = store
        self._run = RunId(file.name)
        self._is_bound = bool(file.members_sha256)
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
