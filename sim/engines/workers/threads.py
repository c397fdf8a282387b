"""The engine "threads": a few clients at a time, each on a thread with its own model.

It is for models with long steps, such as convolutional networks. Torch releases Python's lock while it computes, so
threads keep all cores busy in half the memory of processes. Short steps would wait for the lock; stacking suits those.
"""

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from umbel.client.local.devices import whole_float32
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.partition.partition import Indices
from umbel.sim.engines.device import CPU, chunks, devices_of, one_thread, rows_of_block
from umbel.sim.engines.model import ModelRecipe
from umbel.sim.engines.training import Arithmetic, Draws, LocalTrainer, Losses, changes_of, draws_of
from umbel.sim.engines.work import Changes, CohortWork, EngineError

_DRAWS = (
    "the model draws random numbers while it trains, as dropout does, and threads share one stream of them; set "
    'name = "processes" in [engine]'
)


@dataclass(frozen=True, slots=True)
class _ThreadWorker:
    """`blocks`: float32 (2, rows, n_values), for the changes; one is read while the other is written."""

    trainer: LocalTrainer
    blocks: Tensor

    def train(self, work: CohortWork, positions: Indices, block: int) -> Losses:
        torch.set_num_threads(1)  # a setting of each thread
        return self.trainer.train(work, positions, self.blocks[block])


def require_no_draws(model: nn.Module, samples: SampleSet) -> None:
    """Raise `EngineError` for a model that draws random numbers, as tried with these samples."""
    if draws_of(lambda: model.train()(samples.inputs), CPU) is not Draws.NOTHING:
        raise EngineError(_DRAWS)


class ThreadsEngine:
    """`n_workers`: threads, by default one for each core, or GPU.

    All threads share torch's generators, so a model that draws from one, as for dropout, is refused.
    """

    name = "threads"

    def __init__(
        self, recipe: ModelRecipe, n_workers: int | None = None, device: str = "cpu", arithmetic: Arithmetic = "auto"
    ) -> None:
        self._workers = [_worker(recipe, one, arithmetic) for one in devices_of(device, n_workers)]

    def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        """As `Engine.train`. Meanwhile torch uses one thread in the whole process."""
        with one_thread(), whole_float32(self._workers[0].trainer.device):
            for worker in self._workers:
                worker.trainer.begin(start, work)
            if self._workers[0].trainer.draws is not Draws.NOTHING:
                raise EngineError(_DRAWS)
            yield from self._train(work)

    def close(self) -> None:
        """Nothing is held between cohorts but memory."""

    def _train(self, work: CohortWork) -> Iterator[Changes]:
        waiting = chunks(work.steps, len(self._workers), self._workers[0].blocks.shape[1])
        running = dict[Future[Losses], tuple[_ThreadWorker, Indices, int]]()
        with ThreadPoolExecutor(len(self._workers), thread_name_prefix="training") as pool:

            def give(worker: _ThreadWorker, block: int) -> None:
                if (positions := next(waiting, None)) is not None:
                    running[pool.submit(worker.train, work, positions, block)] = worker, positions, block

            try:
                for worker in self._workers:
                    give(worker, 0)
                while running:
                    for done in wait(running, return_when=FIRST_COMPLETED).done:
                        worker, positions, block = running.pop(done)
                        losses = done.result()
                        give(worker, 1 - block)
                        yield changes_of(positions, worker.blocks[block, : len(positions)], losses)
            finally:
                for worker, _, _ in running.values():
                    worker.trainer.stop()


def _worker(recipe: ModelRecipe, device: str, arithmetic: Arithmetic) -> _ThreadWorker:
    trainer = LocalTrainer(recipe, device, arithmetic)
    n_values = trainer.layout.n_values
    return _ThreadWorker(trainer, torch.empty(2, rows_of_block(n_values), n_values))
