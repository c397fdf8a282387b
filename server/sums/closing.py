"""From a closed round to its result. The result of a round of training is the next model.

One replica takes a lease and makes the model. The other replicas put their shares of the sum into the blob store
(`share.py`). Two replicas that make the model at once make the same files; the first to store the result wins.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from umbel.aggregation.errors import UpdateRefused
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.reports import WorkDone
from umbel.aggregation.round.states import Closing
from umbel.aggregation.run.canary import CanaryClosed, CanaryUpdate
from umbel.aggregation.run.endings import EvaluationClosed, Upshot
from umbel.aggregation.run.server_step import server_step
from umbel.aggregation.secagg.errors import CheatingDealer, SecAggError
from umbel.aggregation.secagg.masked_input import unmasked
from umbel.aggregation.secagg.numbers.totals import Totals, TotalsRefused, totals
from umbel.aggregation.types import ClientId
from umbel.aggregation.update.grid import IntegerSum, sum_sha256
from umbel.server.problems import Refused
from umbel.server.services import Services
from umbel.server.store.outage import DatabaseAway
from umbel.server.store.replicas import closing_job
from umbel.server.store.stored import LiveRun
from umbel.server.store.versions import BeingRemoved
from umbel.server.sums.model_files import ModelFiles, ParentFiles, SummedRound, next_model
from umbel.server.sums.model_removal import hold
from umbel.server.sums.secure import SecureRounds
from umbel.server.sums.share import DamagedSum, Folding, ReplicaShare, SumDropped
from umbel.server.sums.updates import RoundCodec, largest_change

_log = logging.getLogger(__name__)
_SUM_TRIES = 3
_STORE_TRIES = 12  # some seven minutes at the driver's retry times: a disk or bucket may become available again


class NothingMade(Exception):
    """The round can never have a result, for the reason in the message."""

    def __init__(self, reason: str, blamed: Mapping[ClientId, str] | None = None) -> None:
        """`blamed`: the clients at fault, each with the reason."""
        super().__init__(reason)
        self.blamed = blamed or {}


class Closer:
    """Closes a run's newest attempt at this replica. `share`: this replica's share of the sum."""

    def __init__(self, services: Services, layout: Layout, codec: RoundCodec, secure: SecureRounds) -> None:
        self.share = ReplicaShare(services, codec)
        self._services = services
        self._secure = secure
        self._layout = layout
        self._codec = codec
        self._n_failed = 0
        self._removing: set[asyncio.Future[None]] = set()

    async def close(self, live: LiveRun) -> Upshot | None:
        """Return the round's result; None while another replica makes it, or shares of the sum are missing.

        Raises `NothingMade` if there will be none. After any other error the caller may try again.
        """
        if live.plan.adds_up:
            return await self._summed(live)
        if not live.plan.has_uploads:
            return EvaluationClosed()
        try:
            return await read_canary(self._services, live, self._codec)
        except (FileNotFoundError, UpdateRefused) as error:
            raise NothingMade(_unreadable(error)) from error

    async def _summed(self, live: LiveRun) -> ModelFiles | EvaluationClosed | None:
        closing = live.state
        assert isinstance(closing, Closing)
        try:
            await self.share.take_up(live, closing.accepted)
            if not await self.leads(live):
                await self.share.post(live)
                if closing.secure:
                    await self._secure.hand_over(live)
                return None
            if closing.secure:
                await self._secure.collect(live)
                if not closing.is_unmasking:
                    return None
            folding = await self.share.whole(live, closing)
            if folding is None:
                return None
            total = await self._total(closing, folding)
            if live.plan.task.makes_model:
                return await self._make_model(live, closing, total)
            found = await self._unmasked(live, closing, total)
            return None if found is None else EvaluationClosed(found)
        except (SumDropped, Refused):
            return None  # another replica has ended the round
        except NothingMade:
            raise
        except Exception as error:
            await self._retry(live, error)
            raise

    async def leads(self, live: LiveRun) -> bool:
        """Whether this replica makes the round's model. After a round has closed, only that one may adopt reports."""
        return await self._services.replicas.take(closing_job(live.round_id))

    async def end(self, ended: LiveRun, keys: Iterable[str]) -> None:
        """Drop the sum of an attempt that has ended, and remove its updates. What a crash leaves is swept later."""
        await self.forget()
        removing = asyncio.ensure_future(asyncio.to_thread(self._services.blobs.delete, list(keys)))
        self._removing.add(removing)
        removing.add_done_callback(self._removed)

    async def forget(self) -> None:
        """Drop the sum and the revealed shares, because the attempt is over."""
        self._n_failed = 0
        self._secure.forget()
        await self.share.forget()

    async def settle(self) -> None:
        """Wait until a hand-in and removals of updates that have begun are done."""
        await self.share.settle()
        await asyncio.gather(*self._removing, return_exceptions=True)

    async def _total(self, closing: Closing, folding: Folding) -> IntegerSum:
        """The sum of exactly the accepted uploads. Raises `DamagedSum` for any other."""
        total, clients = await folding.total(), folding.clients | folding.merged
        if clients != set(closing.accepted) or total.total_weight != closing.aggregate.total_weight:
            raise DamagedSum("the sum does not contain exactly the accepted updates")
        return total

    async def _make_model(self, live: LiveRun, closing: Closing, total: IntegerSum) -> ModelFiles | None:
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
        step = server_step(file, closing, summed.totals)
        make = partial(next_model, services.blobs, self._layout, base, summed, step, file.downlink.change_step)
        try:
            files = await asyncio.get_running_loop().run_in_executor(services.worker, make)
        except ValueError as error:  # it would fail again; a full disk is an OSError, and may pass
            raise NothingMade(f"no model can be made of the sum: {error}") from error
        await hold(services, closing_job(live.round_id), files.sha256s)
        return files

    async def _unmasked(self, live: LiveRun, closing: Closing, total: IntegerSum) -> Totals | None:
        """The decoded totals of a secure round; None while too few clients have revealed shares."""
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

        def unmask() -> Totals:
            levels, words = unmasked(total, composition, opened)
            return totals(composition, levels, words, ranks)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._services.worker, unmask)
        except TotalsRefused as error:
            raise NothingMade(str(error)) from error

    async def _retry(self, live: LiveRun, error: Exception) -> None:
        """Drop the sum after an error, so that it is folded again. Raises `NothingMade` after too many errors."""
        await self.share.drop()
        if isinstance(error, SQLAlchemyError | DatabaseAway | BeingRemoved):
            return  # the stored updates are intact, and the error may pass
        self._n_failed += 1
        is_store = isinstance(error, OSError) and not isinstance(error, FileNotFoundError | DamagedSum)
        if self._n_failed >= (_STORE_TRIES if is_store else _SUM_TRIES):
            _log.error("run %s: the sum of round %d cannot be made", live.name, live.plan.number, exc_info=error)
            raise NothingMade(_unreadable(error)) from error

    def _removed(self, removing: "asyncio.Future[None]") -> None:
        self._removing.discard(removing)
        if not removing.cancelled() and (error := removing.exception()) is not None:
            _log.warning("updates of an ended round could not be removed; trying again later: %s", error)


async def read_canary(services: Services, live: LiveRun, round_codec: RoundCodec) -> CanaryClosed:
    """Measure the accepted updates of a canary that has closed; `aggregation/run/canary.py` judges them.

    Every replica gets the same result. Raises `OSError` or an `UpdateRefused` for an update that was lost or damaged.
    """
    assert isinstance(live.state, Closing)
    chunks = await services.uploads.chunks([live.assignment_id(client) for client in live.state.accepted])
    loop, sent, codec = asyncio.get_running_loop(), dict[ClientId, CanaryUpdate](), round_codec.plain(live.plan)
    for client, accepted in live.state.accepted.items():
        assert isinstance(accepted.work, WorkDone), "a canary's clients train"
        mine, rank = chunks[live.assignment_id(client)], round_codec.rank(live, client)
        largest = await loop.run_in_executor(services.worker, largest_change, services.blobs, mine, codec, rank)
        sent[client] = CanaryUpdate(accepted.work, sum(chunk.length for chunk in mine), largest)
    return CanaryClosed(sent)


def _unreadable(error: Exception) -> str:
    return f"an accepted update could not be read again ({type(error).__name__})"
