"""From a closed round to its next model: this replica's share of the sum, the others' shares, the commit's files.

Each replica folds the reports that it took itself. When the round has closed, one of them has the lease to make its
model; the others put their partial sums into the blob store. What a dead replica had folded is adopted
(`RoundStore.adopt`) and folded again from the stored updates. Integers add to the same bits whoever adds them, so it
does not matter who does, nor whether two replicas do it at once: the first to store the outcome wins, and both have
made the same files.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

from umbel.aggregation.layout import Layout
from umbel.aggregation.round import Accepted, Closing
from umbel.aggregation.types import ClientId
from umbel.server.folding import Folding
from umbel.server.model_files import ModelFiles, next_model
from umbel.server.services import Services
from umbel.server.stored import Chunk, LiveRun, PartialSum

_log = logging.getLogger(__name__)
_SUM_TRIES = 3


class SumFailed(Exception):
    """No model will ever come of this round; says why."""


class Closer:
    """What one replica folds of a run's newest attempt, and how it closes it."""

    def __init__(self, services: Services, layout: Layout) -> None:
        self._services = services
        self._layout = layout
        self._folding: Folding | None = None
        self._posted_for = 0
        self._n_failed = 0
        self._removing: set[asyncio.Future[None]] = set()

    def fold(self, live: LiveRun, client: ClientId, chunks: Sequence[Chunk], weight: int) -> None:
        """Add an accepted update to this replica's share of the sum."""
        if self._folding is None:
            services = self._services
            self._folding = Folding(self._layout.n_values, live.plan.grid, services.blobs, services.worker)
        self._folding.add(client, chunks, weight)

    async def take_up(self, live: LiveRun, accepted: Mapping[ClientId, Accepted]) -> None:
        """Fold what this replica answers for and has not folded yet, from what is stored.

        What others have adopted, having taken this replica for dead, must not be in its share: then it begins anew.
        """
        me = self._services.replicas.id
        mine = {client for client, replica in live.folded_by.items() if replica == me}
        if self._folding is not None and not self._folding.clients <= mine:
            await self.forget()
        new = sorted(mine - self._folding.clients if self._folding else mine)
        if not new:
            return
        chunks = await self._services.uploads.chunks([live.assignment_id(client) for client in new])
        for client in new:
            self.fold(live, client, chunks[live.assignment_id(client)], accepted[client].weight)

    async def close(self, live: LiveRun) -> ModelFiles | None:
        """The next model, durable; None while another replica makes it, or its share of the sum is not in.

        Raises `SumFailed`; anything else may pass.
        """
        closing = live.state
        assert isinstance(closing, Closing)
        await self.take_up(live, closing.accepted)
        if not await self._services.replicas.take(_job(live)):
            await self._post(live)
            return None
        try:
            folding = await self._whole_sum(live, closing)
        except Exception as error:
            await self._retry(live, closing, error)
            raise
        return None if folding is None else await self._make_model(live, closing, folding)

    async def end(self, ended: LiveRun, keys: Iterable[str]) -> None:
        """The attempt is over: let go of its sum, and remove its updates. What a crash leaves is swept later."""
        await self.forget()
        await self._services.replicas.give_up(_job(ended))
        removing = asyncio.ensure_future(asyncio.to_thread(self._services.blobs.delete, list(keys)))
        self._removing.add(removing)
        removing.add_done_callback(self._removed)

    async def forget(self) -> None:
        """Let go of the sum."""
        folding, self._folding = self._folding, None
        self._n_failed = 0
        if folding is not None:
            await folding.discard()

    async def settle(self) -> None:
        """Wait for what is still being removed."""
        await asyncio.gather(*self._removing, return_exceptions=True)

    async def _whole_sum(self, live: LiveRun, closing: Closing) -> Folding | None:
        """The sum of every accepted report; None while a part of it is not in."""
        folding = self._folding
        if folding is None:
            folding = self._folding = Folding(
                self._layout.n_values, live.plan.grid, self._services.blobs, self._services.worker
            )
        await folding.total()
        missing = closing.accepted.keys() - folding.clients - folding.merged
        if missing:
            for partial in await self._services.rounds.partial_sums(live.round_id):
                if missing.issuperset(partial.clients):
                    await folding.merge(partial)
                    missing -= set(partial.clients)
        return None if missing else folding

    async def _make_model(self, live: LiveRun, closing: Closing, folding: Folding) -> ModelFiles:
        total = await folding.total()
        assert folding.clients | folding.merged == closing.accepted.keys(), "the sum is of other reports"
        assert total.total_weight == closing.aggregate.total_weight, "the sum is not of the accepted weights"
        services, rate = self._services, live.run.file.aggregation.server_learning_rate
        try:
            return await asyncio.get_running_loop().run_in_executor(
                services.worker, next_model, services.blobs, self._layout, live.run.master_sha256, total, rate
            )
        except ValueError as error:  # the same sum would fail again; a full disk is an OSError, and passes
            raise SumFailed(f"no model can be made of the sum: {error}") from error

    async def _post(self, live: LiveRun) -> None:
        """Hand this replica's share of the sum to whoever closes the round."""
        folding, services = self._folding, self._services
        if folding is None or not folding.clients or folding.merged or self._posted_for == live.round_id:
            return
        key = f"partials/{live.round_id}/{services.replicas.id}"
        with services.blobs.scratch() as path:
            sha256, total_weight = await folding.write(path)
            clients = tuple(sorted(folding.clients))
            await asyncio.to_thread(services.blobs.put, path, key)
        partial = PartialSum(services.replicas.id, key, sha256, clients, total_weight)
        if await services.rounds.post_partial_sum(live, partial):
            self._posted_for = live.round_id
            _log.info("run %s, round %d: handed in the sum of %d reports", live.name, live.plan.number, len(clients))
        else:
            await self.forget()  # this replica was taken for dead, and others have adopted its share

    async def _retry(self, live: LiveRun, closing: Closing, error: Exception) -> None:
        """After a fold that failed the sum is undefined: make it again from what is stored, but not for ever."""
        n_failed = self._n_failed + 1
        await self.forget()
        self._n_failed = n_failed
        if n_failed >= _SUM_TRIES:
            _log.error("run %s: the sum of round %d cannot be made", live.name, live.plan.number, exc_info=error)
            raise SumFailed(f"an accepted update could not be read again ({type(error).__name__})") from error
        await self.take_up(live, closing.accepted)

    def _removed(self, removing: "asyncio.Future[None]") -> None:
        self._removing.discard(removing)
        if not removing.cancelled() and (error := removing.exception()) is not None:
            _log.warning("updates of an ended round could not be removed; they are swept later: %s", error)


def _job(live: LiveRun) -> str:
    return f"close.{live.round_id}"
