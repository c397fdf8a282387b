"""The engine "processes": divides clients among worker processes, one for each core of this machine or each GPU.

The first cohort starts the workers (`pool.py`). The start, the samples of all clients and the blocks of changes are
shared memory (`worker_process.py`); a message tells a worker which clients train on which rows. A worker makes the
model from its recipe.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from umbel.aggregation.model.layout import Layout
from umbel.client.channel import Channel
from umbel.sim.data.data_set import SampleSet
from umbel.sim.engines.device import chunks, devices_of, part_of, rows_of_block
from umbel.sim.engines.model import ModelRecipe
from umbel.sim.engines.training import Arithmetic, changes_of, require_trainable
from umbel.sim.engines.work import Changes, CohortWork
from umbel.sim.engines.workers.pool import PoolWorker, WorkerChunk, WorkerPool
from umbel.sim.engines.workers.worker_process import SharedTensor, send_chunk, send_model, send_shared


class SharedSamples:
    """The samples of all clients in shared memory, copied when they are first seen."""

    def __init__(self) -> None:
        self._known: tuple[SampleSet, SharedTensor, SharedTensor] | None = None

    def take(self, samples: SampleSet) -> bool:
        """Whether these samples are new."""
        known = self._known
        if known and samples.inputs is known[0].inputs and samples.targets is known[0].targets:
            return False
        self._known = samples, SharedTensor.of(samples.inputs), SharedTensor.of(samples.targets)
        return True

    def send(self, channel: Channel) -> None:
        if self._known is not None:
            send_shared(channel, "samples", *self._known[1:])


class ProcessesEngine:
    """`n_workers`: by default one for each core, or with `device = "cuda"` for each GPU.

    Samples are copied when they are first seen and must not be changed in place afterwards.
    """

    name = "processes"

    def __init__(
        self, recipe: ModelRecipe, n_workers: int | None = None, device: str = "cpu", arithmetic: Arithmetic = "auto"
    ) -> None:
        recipe.to_json()  # raises if it cannot be sent
        self._recipe, self._arithmetic = recipe, arithmetic
        self._layout = Layout.of_state(recipe.make().state_dict())
        n_values = self._layout.n_values
        self._rows = rows_of_block(n_values)
        self._start, self._samples = SharedTensor((n_values,), torch.float32), SharedSamples()
        self._cohort = 0
        devices = devices_of(device, n_workers)
        self._blocks = [SharedTensor((2, self._rows, n_values), torch.float32) for _ in devices]
        self._pool = WorkerPool(devices, self._introduce)

    @property
    def pids(self) -> list[int]:
        """Of the running workers."""
        return self._pool.pids

    def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        """As `Engine.train`. One cohort at a time."""
        require_trainable(work, start, self._layout)
        self._cohort += 1
        self._start.tensor.copy_(start)
        if self._samples.take(work.data.samples):
            self._pool.tell(lambda channel, _: self._samples.send(channel))
        waiting = chunks(work.steps, len(self._pool), self._rows)

        def give(channel: Channel, chunk: WorkerChunk) -> None:
            send_chunk(channel, self._cohort, chunk.half, part_of(work, chunk.positions))

        for done in self._pool.run(waiting, len(work.data), give):
            positions = done.chunk.positions
            values = self._blocks[done.number].tensor[done.chunk.half, : len(positions)]
            yield changes_of(positions, values, done.answer.arrays[0])

    def close(self) -> None:
        """End the workers; another cohort starts them again."""
        self._pool.close()

    def _introduce(self, channel: Channel, worker: PoolWorker) -> None:
        send_model(channel, self._recipe, worker.device, self._arithmetic)
        self._samples.send(channel)
        send_shared(channel, "block", self._blocks[worker.number])
        send_shared(channel, "start", self._start)
