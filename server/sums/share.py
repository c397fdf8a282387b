"""This replica's share of a round's sum: folded as reports come, and handed in for others, or for after a restart.

Each replica folds the reports that it took itself. What a dead replica had folded is adopted (`RoundStore.adopt`) and
folded again from the stored updates. Integers add to the same bits whoever adds them.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy.exc import SQLAlchemyError

from umbel.aggregation.codec.update_codec import Part
from umbel.aggregation.round.states import Abandoned, Accepted, Closing, Committed
from umbel.aggregation.types import AssignmentId, ClientId
from umbel.server.services import Services
from umbel.server.store.outage import DatabaseAway
from umbel.server.store.stored import Chunk, LiveRun, PartialSum
from umbel.server.store.uploads import UpdateGone
from umbel.server.sums.folding import Folding, SumDropped
from umbel.server.sums.round_codec import RoundCodec

_log = logging.getLogger(__name__)
KEPT_MAX = 16  # masked updates that wait: to fold that many reads several times the bytes of the one sum to write
HAND_IN_S = 5.0  # between two writings of a masked sum, unless `KEPT_MAX` updates wait: it is as large as eight updates


@dataclass(frozen=True, slots=True)
class _Posted:
    """The sum that was handed in last."""

    round_id: int
    key: str
    clients: frozenset[ClientId]
    at: float  # Unix seconds


class ReplicaShare:
    """The share of a run's newest attempt. Ask with the run as it is at that moment."""

    def __init__(self, services: Services, codec: RoundCodec) -> None:
        self._services = services
        self._codec = codec
        self._folding: Folding | None = None
        self._newest: LiveRun | None = None  # as it was at the last fold
        self._n_posted = 0
        self._posted: _Posted | None = None
        self._posting = asyncio.Lock()  # of two that are posted, the older could take the newer's file with it
        self._forgotten: frozenset[ClientId] = frozenset()  # those in the posted sum whose updates were deleted
        self._handing_in: asyncio.Task[None] | None = None
        self._is_due = asyncio.Event()  # no more waiting before the next hand-in

    # --- folding ------------------------------------------------------------------------------------------------------

    def fold(self, live: LiveRun, client: ClientId, chunks: Sequence[Chunk], weight: int) -> None:
        """Add an accepted update, unless it is in.

        A masked one is not kept: once a sum with it is in the blob store, it is deleted.
        """
        folding = self._sum(live)
        folding.add(client, chunks, Part(weight, self._codec.rank(live, client)))
        self._newest = live
        if not live.plan.is_secure:
            return
        if len(folding.clients - self._forgotten) >= KEPT_MAX:
            self._is_due.set()
        if self._handing_in is None or self._handing_in.done():
            self._handing_in = asyncio.create_task(self._hand_in(), name=f"masked sum of {live.name}")

    async def take_up(self, live: LiveRun, accepted: Mapping[ClientId, Accepted]) -> None:
        """Fold the updates of this share that are not in yet, from store.

        Others may have taken this replica for dead and adopted updates, which must not be in its share: then it begins
        anew. Raises `SumDropped` if another replica has ended the round meanwhile.
        """
        me = self._services.replicas.id
        mine = {client for client, replica in live.folded_by.items() if replica == me}
        if self._folding is not None and not self._folding.clients <= mine:
            _log.warning("run %s: other replicas have adopted reports of this one; its sum begins anew", live.name)
            await self.drop()
        new = sorted(mine - self._folding.clients if self._folding else mine)
        if live.plan.is_secure and self._folding is None:
            new = await self._restore(live, new)
        if not new:
            return
        chunks = await self._chunks(live, new)
        for client in new:
            self.fold(live, client, chunks[live.assignment_id(client)], accepted[client].weight)

    async def whole(self, live: LiveRun, closing: Closing) -> Folding | None:
        """The sum of every accepted report, with the shares of other replicas; None while one of these is not in."""
        folding = self._sum(live)
        await folding.total()
        missing = closing.accepted.keys() - folding.clients - folding.merged
        if missing:
            for partial in await self._services.rounds.partial_sums(live.round_id):
                if missing.issuperset(partial.clients):
                    await folding.merge(partial)
                    missing -= set(partial.clients)
                elif missing.intersection(partial.clients):  # posted anew, with more in it than was merged
                    await self.drop()
                    return None
        return None if missing else folding

    async def _restore(self, live: LiveRun, clients: Sequence[ClientId]) -> list[ClientId]:
        """Begin with what this replica has handed in, whose updates are gone; the clients that are not in it."""
        me = self._services.replicas.id
        for handed_in in await self._services.rounds.partial_sums(live.round_id):
            if handed_in.replica == me:
                folding = self._sum(live)
                await folding.restore(handed_in)
                return [client for client in clients if client not in folding.clients]
        return list(clients)

    async def _chunks(self, live: LiveRun, clients: Sequence[ClientId]) -> Mapping[AssignmentId, tuple[Chunk, ...]]:
        try:
            return await self._services.uploads.chunks([live.assignment_id(client) for client in clients])
        except UpdateGone as error:
            if isinstance(await self._services.rounds.round_state(live.round_id), Committed | Abandoned):
                raise SumDropped from error
            raise

    def _sum(self, live: LiveRun) -> Folding:
        if self._folding is None:
            self._folding = Folding(self._codec.of(live), self._services.blobs, self._services.worker)
        return self._folding

    # --- handing in ---------------------------------------------------------------------------------------------------

    async def post(self, live: LiveRun) -> None:
        """Put the sum so far into the blob store, for the replica that closes the round, or for after a restart."""
        async with self._posting:
            await self._post(live)

    async def _post(self, live: LiveRun) -> None:
        folding, services, replaced = self._folding, self._services, self._posted_of(live)
        if folding is None or not folding.clients or (replaced and replaced.clients == folding.clients):
            return
        if folding.merged:  # the round was this replica's to close, until it was taken for dead
            await self.drop()
            return
        self._n_posted += 1  # no posting writes over the one before, which still counts
        key = f"partials/{live.round_id}/{services.replicas.id}.{self._n_posted}"
        with services.blobs.scratch() as path:
            written = await folding.write(path)
            await asyncio.to_thread(services.blobs.put, path, key)
        clients = tuple(sorted(written.clients))
        partial = PartialSum(services.replicas.id, key, written.sha256, clients, written.total_weight)
        if not await services.rounds.post_partial_sum(live, partial):
            await asyncio.to_thread(services.blobs.delete, [key])
            return
        if self._folding is folding:
            self._posted = _Posted(live.round_id, key, written.clients, services.clock.now())
        if replaced is not None:
            await asyncio.to_thread(services.blobs.delete, [replaced.key])
        _log.info("run %s, round %d: handed in the sum of %d reports", live.name, live.plan.number, len(clients))

    async def _hand_in(self) -> None:
        """Post the sum so far, and delete the masked updates in it; until all are.

        It is posted when nothing has come for a moment and `HAND_IN_S` have passed since the last time, or `KEPT_MAX`
        updates wait. A failure is tried again with the next update, or when the round has closed.
        """
        tried = set[ClientId]()
        try:
            while (folding := self._folding) is not None and not folding.merged and folding.clients != tried:
                tried, live = set(folding.clients), self._newest
                assert live is not None, "a sum is of some attempt"
                await folding.total()
                n_kept = len(folding.clients - self._forgotten)
                if n_kept < KEPT_MAX and await self._waited(live):
                    tried = set()
                elif folding is self._folding and (folding.clients == tried or n_kept >= KEPT_MAX):
                    await self.post(live)
                    await self._forget_posted(live)
        except (SumDropped, DatabaseAway, SQLAlchemyError, OSError) as error:
            _log.info("a masked sum is handed in later (%s)", type(error).__name__)

    async def _waited(self, live: LiveRun) -> bool:
        """Wait until the next hand-in is due; returns False if it was due already."""
        posted, now = self._posted_of(live), self._services.clock.now()
        left_s = posted.at + HAND_IN_S - now if posted else 0.0
        if self._is_due.is_set() or left_s <= 0:
            self._is_due.clear()
            return False
        await self._services.clock.wait(self._is_due, min(left_s, HAND_IN_S))
        return True

    def _posted_of(self, live: LiveRun) -> _Posted | None:
        return self._posted if self._posted and self._posted.round_id == live.round_id else None

    async def _forget_posted(self, live: LiveRun) -> None:
        """Delete the masked updates that are in the sum that was handed in."""
        posted = self._posted_of(live)
        if posted is not None and (new := posted.clients - self._forgotten):
            keys = await self._services.uploads.forget([live.assignment_id(client) for client in sorted(new)])
            await asyncio.to_thread(self._services.blobs.delete, keys)
            self._forgotten = posted.clients

    # --- letting go ---------------------------------------------------------------------------------------------------

    async def drop(self) -> None:
        """Let go of the sum: it can be made again from what is stored."""
        folding, self._folding = self._folding, None
        self._is_due.set()
        if folding is not None:
            await folding.discard()

    async def forget(self) -> None:
        """The attempt is over: let go of all."""
        self._posted, self._forgotten = None, frozenset()
        await self.drop()

    async def settle(self) -> None:
        """Wait for a hand-in that has begun."""
        if self._handing_in is not None:
            self._is_due.set()
            await asyncio.wait([self._handing_in])
