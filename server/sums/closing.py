"""From a closed round to what is made of it, which for a round of training is the next model: this replica's share of
the sum, the others' shares, the commit's files.

Each replica folds the reports that it took itself. When the round has closed, one of them has the lease to make its
model; the others put their partial sums into the blob store. What a dead replica had folded is adopted
(`RoundStore.adopt`) and folded again from the stored updates. Integers add to the same bits whoever adds them, so it
does not matter who does, nor whether two replicas do it at once: the first to store the outcome wins, and both have
made the same files.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from umbel.aggregation.codec.update_codec import Part
from umbel.aggregation.errors import UpdateRefused
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.round.states import Abandoned, Accepted, Closing, Committed
from umbel.aggregation.run.endings import EvaluationClosed, Upshot
from umbel.aggregation.secagg.errors import CheatingDealer, SecAggError
from umbel.aggregation.secagg.masked_input import unmasked
from umbel.aggregation.secagg.numbers.totals import Totals, TotalsRefused, totals
from umbel.aggregation.types import AssignmentId, ClientId
from umbel.aggregation.update.integer_sum import IntegerSum, sum_sha256
from umbel.server.problems import Refused
from umbel.server.services import Services
from umbel.server.store.outage import DatabaseAway
from umbel.server.store.replicas import closing_job
from umbel.server.store.stored import Chunk, LiveRun, PartialSum
from umbel.server.store.uploads import UpdateGone
from umbel.server.store.versions import BeingRemoved
from umbel.server.sums.folding import DamagedSum, Folding, SumDropped
from umbel.server.sums.model_files import ModelFiles, ParentFiles, SummedRound, next_model
from umbel.server.sums.model_removal import hold
from umbel.server.sums.round_codec import RoundCodec
from umbel.server.sums.secure import SecureRounds
from umbel.server.sums.trial import look_at

_log = logging.getLogger(__name__)
_SUM_TRIES = 3
KEPT_MAX = 16  # masked updates that wait: to fold so many reads several times the bytes of the one sum to write
_STORE_TRIES = 12  # about seven minutes, as the driver goes about it: a disk or a bucket that is away may come back


class NothingMade(Exception):
    """Nothing will ever come of this round; says why. `blamed`: client -> why, where it is by its doing."""

    def __init__(self, reason: str, blamed: Mapping[ClientId, str] | None = None) -> None:
        super().__init__(reason)
        self.blamed = blamed or {}


class Closer:
    """What one replica folds of a run's newest attempt, and how it closes it."""

    def __init__(self, services: Services, layout: Layout, codec: RoundCodec, secure: SecureRounds) -> None:
        self._services = services
        self._secure = secure
        self._layout = layout
        self._codec = codec
        self._folding: Folding | None = None
        self._posted: tuple[int, frozenset[ClientId]] = (0, frozenset())
        self._n_failed = 0
        self._n_posted = 0
        self._posted_key = ""
        self._removing: set[asyncio.Future[None]] = set()
        self._handing_in: asyncio.Task[None] | None = None
        self._posting = asyncio.Lock()  # of two that are posted, the older could take the newer's file with it
        self._summed: LiveRun | None = None  # as it was at the last fold
        self._forgotten: frozenset[ClientId] = frozenset()  # of those in the sum that was handed in

    def fold(self, live: LiveRun, client: ClientId, chunks: Sequence[Chunk], weight: int) -> None:
        """Add an accepted update to this replica's share of the sum, unless it is in.

        A masked one is not kept: as soon as the sum with it is in the blob store, it is deleted.
        """
        self._sum(live).add(client, chunks, Part(weight, self._codec.rank(live, client)))
        self._summed = live
        if live.plan.is_secure and (self._handing_in is None or self._handing_in.done()):
            self._handing_in = asyncio.create_task(self._hand_in(), name=f"masked sum of {live.name}")

    async def take_up(self, live: LiveRun, accepted: Mapping[ClientId, Accepted]) -> None:
        """Fold what this replica answers for and has not folded yet, from what is stored.

        What others have adopted, having taken this replica for dead, must not be in its share: then it begins anew.
        Raises `SumDropped` if another replica has ended the round meanwhile.
        """
        me = self._services.replicas.id
        mine = {client for client, replica in live.folded_by.items() if replica == me}
        if self._folding is not None and not self._folding.clients <= mine:
            _log.warning("run %s: other replicas have adopted reports of this one; its sum begins anew", live.name)
            await self._drop()
        new = sorted(mine - self._folding.clients if self._folding else mine)
        if live.plan.is_secure and self._folding is None:
            new = await self._restore(live, new)
        if not new:
            return
        chunks = await self._chunks(live, new)
        for client in new:
            self.fold(live, client, chunks[live.assignment_id(client)], accepted[client].weight)

    async def close(self, live: LiveRun) -> Upshot | None:
        """What the closed round makes; None while another replica makes it, or its share of the sum is not in.

        Raises `NothingMade`; anything else may pass.
        """
        if live.plan.task.makes_model:
            return await self._model(live)
        if not live.plan.task.sends_updates:
            return EvaluationClosed()
        try:
            return await look_at(self._services, live, self._layout)
        except (FileNotFoundError, UpdateRefused) as error:
            raise NothingMade(_unreadable(error)) from error

    async def _model(self, live: LiveRun) -> ModelFiles | None:
        """The next model, durable."""
        closing = live.state
        assert isinstance(closing, Closing)
        try:
            await self.take_up(live, closing.accepted)
            if not await self.leads(live):
                await self._post(live)
                if closing.secure:
                    await self._secure.hand_over(live)
                return None
            if closing.secure:
                await self._secure.collect(live)
                if not closing.is_unmasking:
                    return None
            folding = await self._whole_sum(live, closing)
            return None if folding is None else await self._make_model(live, closing, folding)
        except (SumDropped, Refused):
            return None  # another replica has ended the round meanwhile
        except NothingMade:
            raise
        except Exception as error:
            await self._retry(live, error)
            raise

    async def _hand_in(self) -> None:
        """Put the sum so far into the blob store, and delete the masked updates that are in it; until all are.

        What comes while this goes on is seen by the loop. The sum is written when nothing has come for a moment, or
        `KEPT_MAX` updates wait. What fails here is tried again with the next update, or when the round has closed.
        """
        tried = set[ClientId]()
        try:
            while (folding := self._folding) is not None and not folding.merged and folding.clients != tried:
                tried, live = set(folding.clients), self._summed
                assert live is not None, "a sum is of some attempt"
                await folding.total()
                n_kept = len(folding.clients - self._forgotten)
                if folding is self._folding and (folding.clients == tried or n_kept >= KEPT_MAX):
                    await self._post(live)
                    await self._forget_posted(live)
        except (SumDropped, DatabaseAway, SQLAlchemyError, OSError) as error:
            _log.info("a masked sum is handed in later (%s)", type(error).__name__)

    async def _forget_posted(self, live: LiveRun) -> None:
        """Delete the masked updates that are in the sum that was handed in."""
        round_id, posted = self._posted
        if round_id == live.round_id and (new := posted - self._forgotten):
            keys = await self._services.uploads.forget([live.assignment_id(client) for client in sorted(new)])
            await asyncio.to_thread(self._services.blobs.delete, keys)
            self._forgotten = posted

    async def leads(self, live: LiveRun) -> bool:
        """Whether it is this replica that makes the round's model: it alone may adopt reports then."""
        return await self._services.replicas.take(closing_job(live.round_id))

    async def end(self, ended: LiveRun, keys: Iterable[str]) -> None:
        """The attempt is over: let go of its sum, and remove its updates. What a crash leaves is swept later."""
        await self.forget()
        removing = asyncio.ensure_future(asyncio.to_thread(self._services.blobs.delete, list(keys)))
        self._removing.add(removing)
        removing.add_done_callback(self._removed)

    async def forget(self) -> None:
        """Let go of the sum, and of what was revealed of it: its round is over."""
        self._n_failed = 0
        self._posted_key = ""
        self._forgotten = frozenset()
        self._secure.forget()
        await self._drop()

    async def settle(self) -> None:
        """Wait for what is still being removed."""
        if self._handing_in is not None:
            await asyncio.wait([self._handing_in])
        await asyncio.gather(*self._removing, return_exceptions=True)

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

    async def _whole_sum(self, live: LiveRun, closing: Closing) -> Folding | None:
        """The sum of every accepted report; None while a part of it is not in."""
        folding = self._sum(live)
        await folding.total()
        missing = closing.accepted.keys() - folding.clients - folding.merged
        if missing:
            for partial in await self._services.rounds.partial_sums(live.round_id):
                if missing.issuperset(partial.clients):
                    await folding.merge(partial)
                    missing -= set(partial.clients)
                elif missing.intersection(partial.clients):  # posted anew, with more in it than was merged
                    await self._drop()
                    return None
        return None if missing else folding

    async def _make_model(self, live: LiveRun, closing: Closing, folding: Folding) -> ModelFiles | None:
        total, clients = await folding.total(), folding.clients | folding.merged
        if clients != set(closing.accepted) or total.total_weight != closing.aggregate.total_weight:
            raise DamagedSum("the sum is not that of the accepted reports")
        services, file = self._services, live.run.file
        if not closing.secure:
            codec = self._codec.plain(closing.plan)
            parts = self._codec.parts(live, ((client, one.weight) for client, one in closing.accepted.items()))
            summed = SummedRound(sum_sha256(total), codec.mean(total, parts), codec.update_rms(total))
        elif (found := await self._unmasked(live, closing, total)) is not None:
            summed = SummedRound(found.sum_sha256, found.mean, None, found)
        else:
            return None
        base = ParentFiles(live.run.model.sha256, live.run.master_sha256)
        rate, change_step = file.aggregation.server_learning_rate, file.downlink.change_step
        make = partial(next_model, services.blobs, self._layout, base, summed, rate, change_step)
        try:
            files = await asyncio.get_running_loop().run_in_executor(services.worker, make)
        except ValueError as error:  # the same sum would fail again; a full disk is an OSError, and passes
            raise NothingMade(f"no model can be made of the sum: {error}") from error
        await hold(services, closing_job(live.round_id), files.sha256s)
        return files

    async def _unmasked(self, live: LiveRun, closing: Closing, total: IntegerSum) -> Totals | None:
        """What the clients of a secure round have said together; None while too few have revealed shares."""
        try:
            opened = await self._secure.opened(live)
        except CheatingDealer as error:
            blamed = {ClientId(name): f"it has {error.words}" for name in error.dealers.values()}
            raise NothingMade(f"the sum cannot be unmasked: {error}", blamed) from error
        except SecAggError as error:
            raise NothingMade(f"the sum cannot be unmasked: {error}") from error
        if opened is None:
            return None
        composition = self._codec.composition(closing.plan)
        ranks = [part.rank for part in self._codec.parts(live, ((client, 1) for client in closing.accepted))]
        n_draws = sum(closing.cohort[client].draws for client in closing.accepted)

        def unmask() -> Totals:
            levels, words = unmasked(total, composition, opened)
            return totals(composition, levels, words, ranks, n_draws)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._services.worker, unmask)
        except TotalsRefused as error:
            raise NothingMade(str(error)) from error

    async def _post(self, live: LiveRun) -> None:
        """Hand this replica's share of the sum to whoever closes the round."""
        async with self._posting:
            await self._post_sum(live)

    async def _post_sum(self, live: LiveRun) -> None:
        folding, services = self._folding, self._services
        if folding is None or not folding.clients or self._posted == (live.round_id, frozenset(folding.clients)):
            return
        if folding.merged:  # the round was this replica's to close, until it was taken for dead
            await self._drop()
            return
        replaced = self._posted_key  # as it is now: the round may end meanwhile
        self._n_posted += 1  # no posting writes over the one before, which still counts
        key = f"partials/{live.round_id}/{services.replicas.id}.{self._n_posted}"
        with services.blobs.scratch() as path:
            written = await folding.write(path)
            await asyncio.to_thread(services.blobs.put, path, key)
        clients = tuple(sorted(written.clients))
        partial = PartialSum(services.replicas.id, key, written.sha256, clients, written.total_weight)
        if not await services.rounds.post_partial_sum(live, partial):
            await asyncio.to_thread(services.blobs.delete, [key])
        else:
            if self._folding is folding:
                self._posted_key, self._posted = key, (live.round_id, written.clients)
            if replaced:
                await asyncio.to_thread(services.blobs.delete, [replaced])
            _log.info("run %s, round %d: handed in the sum of %d reports", live.name, live.plan.number, len(clients))

    async def _retry(self, live: LiveRun, error: Exception) -> None:
        """After a fold that failed the sum is undefined: make it again from what is stored, but not for ever."""
        await self._drop()
        if isinstance(error, SQLAlchemyError | DatabaseAway | BeingRemoved):
            return  # the updates are well, and this passes
        self._n_failed += 1
        is_store = isinstance(error, OSError) and not isinstance(error, FileNotFoundError | DamagedSum)
        if self._n_failed >= (_STORE_TRIES if is_store else _SUM_TRIES):
            _log.error("run %s: the sum of round %d cannot be made", live.name, live.plan.number, exc_info=error)
            raise NothingMade(_unreadable(error)) from error

    def _sum(self, live: LiveRun) -> Folding:
        if self._folding is None:
            self._folding = Folding(self._codec.of(live), self._services.blobs, self._services.worker)
        return self._folding

    async def _drop(self) -> None:
        folding, self._folding = self._folding, None
        if folding is not None:
            await folding.discard()

    def _removed(self, removing: "asyncio.Future[None]") -> None:
        self._removing.discard(removing)
        if not removing.cancelled() and (error := removing.exception()) is not None:
            _log.warning("updates of an ended round could not be removed; they are swept later: %s", error)


def _unreadable(error: Exception) -> str:
    return f"an accepted update could not be read again ({type(error).__name__})"
