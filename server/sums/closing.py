"""From a closed round to what is made of it, which for a round of training is the next model.

When a round has closed, one replica has the lease to make its model; the others put their shares of the sum into the
blob store (`share.py`). It does not matter which one makes it, nor whether two do at once: the first to store the
outcome wins, and both have made the same files.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from umbel.aggregation.errors import UpdateRefused
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.round.states import Closing
from umbel.aggregation.run.endings import EvaluationClosed, Upshot
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
from umbel.server.sums.folding import DamagedSum, Folding, SumDropped
from umbel.server.sums.model_files import ModelFiles, ParentFiles, SummedRound, next_model
from umbel.server.sums.model_removal import hold
from umbel.server.sums.round_codec import RoundCodec
from umbel.server.sums.secure import SecureRounds
from umbel.server.sums.share import ReplicaShare
from umbel.server.sums.trial import look_at

_log = logging.getLogger(__name__)
_SUM_TRIES = 3
_STORE_TRIES = 12  # about seven minutes, as the driver tries again: a disk or a bucket that is away may come back


class NothingMade(Exception):
    """Nothing will ever come of this round; says why. `blamed`: clients whose fault it is, and why."""

    def __init__(self, reason: str, blamed: Mapping[ClientId, str] | None = None) -> None:
        super().__init__(reason)
        self.blamed = blamed or {}


class Closer:
    """How one replica closes a run's newest attempt. `share`: its share of the sum."""

    def __init__(self, services: Services, layout: Layout, codec: RoundCodec, secure: SecureRounds) -> None:
        self.share = ReplicaShare(services, codec)
        self._services = services
        self._secure = secure
        self._layout = layout
        self._codec = codec
        self._n_failed = 0
        self._removing: set[asyncio.Future[None]] = set()

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
            return None if folding is None else await self._make_model(live, closing, folding)
        except (SumDropped, Refused):
            return None  # another replica has ended the round meanwhile
        except NothingMade:
            raise
        except Exception as error:
            await self._retry(live, error)
            raise

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
        self._secure.forget()
        await self.share.forget()

    async def settle(self) -> None:
        """Wait for what has begun: a hand-in, and the removal of updates."""
        await self.share.settle()
        await asyncio.gather(*self._removing, return_exceptions=True)

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

    async def _retry(self, live: LiveRun, error: Exception) -> None:
        """After a fold that failed the sum is undefined: make it again from what is stored, but not for ever."""
        await self.share.drop()
        if isinstance(error, SQLAlchemyError | DatabaseAway | BeingRemoved):
            return  # the updates are well, and this passes
        self._n_failed += 1
        is_store = isinstance(error, OSError) and not isinstance(error, FileNotFoundError | DamagedSum)
        if self._n_failed >= (_STORE_TRIES if is_store else _SUM_TRIES):
            _log.error("run %s: the sum of round %d cannot be made", live.name, live.plan.number, exc_info=error)
            raise NothingMade(_unreadable(error)) from error

    def _removed(self, removing: "asyncio.Future[None]") -> None:
        self._removing.discard(removing)
        if not removing.cancelled() and (error := removing.exception()) is not None:
            _log.warning("updates of an ended round could not be removed; they are swept later: %s", error)


def _unreadable(error: Exception) -> str:
    return f"an accepted update could not be read again ({type(error).__name__})"
