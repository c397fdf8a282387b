"""The engine "processes": divides clients among worker processes, one for each core of this machine or each GPU.

The first cohort starts the workers. The start, the samples of all clients and the blocks of changes are shared memory
(`worker_process.py`); a message tells a worker which clients train on which rows. A worker that dies is restarted and
its clients are trained again, which gives the same bits. No worker outlives this process.

A worker is a fresh interpreter and not a fork. It makes the model from its recipe and never imports the program's main
module, so notebooks, and scripts without `if __name__ == "__main__"`, can use this engine.
"""

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from umbel.aggregation.model.layout import Layout
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.partition.partition import Indices
from umbel.sim.engines.device import chunks, devices_of, part_of, rows_of_block
from umbel.sim.engines.model import ModelRecipe
from umbel.sim.engines.training import Arithmetic, changes_of, require_trainable
from umbel.sim.engines.work import Changes, CohortWork, EngineError
from umbel.sim.engines.workers.worker_process import (
    Channel,
    SharedTensor,
    WorkerMessage,
    send_chunk,
    send_model,
    send_shared,
)

_TRIES = 3  # of one chunk, and of one start
log = logging.getLogger("umbel.sim")


@dataclass(slots=True)
class _Chunk:
    """Clients that one worker trains. `half`: of the worker's block, for their changes."""

    positions: Indices
    n_deaths: int = 0
    half: int = 0


@dataclass(slots=True)
class _ProcessWorker:
    """`block`: float32 (2, rows, n_values); one half is read while the other is written. `chunk`: its current work."""

    number: int
    device: str
    block: SharedTensor
    process: "subprocess.Popen[bytes] | None" = None
    channel: Channel | None = field(default=None, repr=False)
    is_ready: bool = False
    chunk: _Chunk | None = None
    next_half: int = 0
    n_failed_starts: int = 0

    def end(self) -> str:
        """Kill it if it runs; say how it ended."""
        if self.process is None or self.channel is None:
            return "it was not running"
        self.process.kill()
        code = self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.channel.close()
        self.process, self.channel, self.is_ready, self.chunk = None, None, False, None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


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
        self._start = SharedTensor((n_values,), torch.float32)
        self._samples: tuple[SampleSet, SharedTensor, SharedTensor] | None = None
        self._cohort = 0
        self._workers = [
            _ProcessWorker(number, one, SharedTensor((2, self._rows, n_values), torch.float32))
            for number, one in enumerate(devices_of(device, n_workers))
        ]
        self._end = weakref.finalize(self, _end_all, self._workers)

    @property
    def pids(self) -> list[int]:
        """Of the running workers."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def train(self, start: Tensor, work: CohortWork) -> Iterator[Changes]:
        """As `Engine.train`. One cohort at a time."""
        require_trainable(work, start, self._layout)
        self._cohort += 1
        self._start.tensor.copy_(start)
        self._share(work.data.samples)
        waiting = deque(map(_Chunk, chunks(work.steps, len(self._workers), self._rows)))
        try:
            while waiting or any(worker.chunk for worker in self._workers):
                for worker in self._workers[: len(work.data)]:  # start no more workers than there are clients
                    self._employ(worker, waiting, work)
                for worker in self._ready_to_read():
                    yield from self._receive(worker, waiting, work)
        except BaseException:  # interrupted, perhaps in the middle of a message
            self.close()
            raise

    def close(self) -> None:
        """End the workers; another cohort starts them again."""
        _end_all(self._workers)

    def _share(self, samples: SampleSet) -> None:
        if self._samples is not None and _is_same(samples, self._samples[0]):
            return
        self._samples = samples, SharedTensor.of(samples.inputs), SharedTensor.of(samples.targets)
        for worker in self._workers:
            if worker.channel is not None:
                with suppress(OSError):  # a dead worker is noticed when it is read
                    send_shared(worker.channel, "samples", *self._samples[1:])

    def _employ(self, worker: _ProcessWorker, waiting: deque[_Chunk], work: CohortWork) -> None:
        """Give an idle worker a chunk, after starting it if it does not run."""
        if not waiting or worker.chunk is not None:
            return
        if worker.channel is None:
            self._begin(worker)
        if not worker.is_ready or worker.channel is None:
            return
        worker.chunk = waiting.popleft()
        worker.chunk.half, worker.next_half = worker.next_half, 1 - worker.next_half
        with suppress(OSError):
            send_chunk(worker.channel, self._cohort, worker.chunk.half, part_of(work, worker.chunk.positions))

    def _begin(self, worker: _ProcessWorker) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            worker.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "umbel.sim.engines.workers.worker_process", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal reaches only the starter
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)},
            )
        worker.channel = Channel(ours)
        assert self._samples is not None
        with suppress(OSError):
            send_model(worker.channel, self._recipe, worker.device, self._arithmetic)
            send_shared(worker.channel, "samples", *self._samples[1:])
            send_shared(worker.channel, "block", worker.block)
            send_shared(worker.channel, "start", self._start)

    def _ready_to_read(self) -> list[_ProcessWorker]:
        """Wait until a worker has sent a message or died."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                if worker.channel is not None:
                    selector.register(worker.channel, selectors.EVENT_READ, worker)
            return [key.data for key, _ in selector.select()]

    def _receive(self, worker: _ProcessWorker, waiting: deque[_Chunk], work: CohortWork) -> Iterator[Changes]:
        assert worker.channel is not None
        try:
            message = worker.channel.receive()
        except EOFError:
            _has_died(worker, waiting)
            return
        match message.kind:
            case "ready":
                worker.is_ready, worker.n_failed_starts = True, 0
            case "failed":
                raise _failure(worker, message)
            case _:
                chunk, worker.chunk = worker.chunk, None
                assert chunk is not None
                self._employ(worker, waiting, work)  # it trains while this half of its block is read
                values = worker.block.tensor[chunk.half, : len(chunk.positions)]
                yield changes_of(chunk.positions, values, message.arrays[0])


def _has_died(worker: _ProcessWorker, waiting: deque[_Chunk]) -> None:
    """Queue its clients again, for a new process. Raises `EngineError` after several failures."""
    was_ready, chunk = worker.is_ready, worker.chunk
    how = worker.end()
    if not was_ready:
        worker.n_failed_starts += 1
        if worker.n_failed_starts == _TRIES:
            raise EngineError(
                f"worker {worker.number} ended {_TRIES} times before it was ready ({how}); its messages on standard "
                "error say why"
            )
    if chunk is None:
        return
    chunk.n_deaths += 1
    if chunk.n_deaths == _TRIES:
        raise EngineError(
            f"workers died {_TRIES} times while they trained the same {len(chunk.positions)} clients (the last one: "
            f"{how}); if the machine is short of memory, use fewer workers"
        )
    log.warning("worker %d died (%s); its %d clients are trained again", worker.number, how, len(chunk.positions))
    waiting.appendleft(chunk)


def _failure(worker: _ProcessWorker, message: WorkerMessage) -> EngineError:
    error = EngineError(f"training failed in worker {worker.number}: {message.fields['error']}")
    error.add_note(message.fields["traceback"])
    return error


def _is_same(samples: SampleSet, known: SampleSet) -> bool:
    return samples.inputs is known.inputs and samples.targets is known.targets


def _end_all(workers: list[_ProcessWorker]) -> None:
    for worker in workers:
        worker.end()
