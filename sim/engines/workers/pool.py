"""Worker processes of this machine: started when they are first needed, given chunks of clients, replaced if they die.

A worker that dies is restarted and its chunk is done again, which gives the same bits. No worker outlives this process.
A worker is a fresh interpreter and not a fork, and never imports the program's main module, so notebooks, and scripts
without `if __name__ == "__main__"`, can use it.
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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from umbel.aggregation.phrases import counted, exit_words
from umbel.client.channel import Channel, ChannelMessage
from umbel.sim.data.partition.partition import Indices
from umbel.sim.engines.work import EngineError

_TRIES = 3  # of one chunk, and of one start
log = logging.getLogger("umbel.sim")


@dataclass(slots=True)
class WorkerChunk:
    """Clients whose work one worker does. `half`: of the worker's block, for their changes."""

    positions: Indices
    n_deaths: int = 0
    half: int = 0


@dataclass(slots=True)
class PoolWorker:
    """`chunk`: its current work."""

    number: int
    device: str
    process: "subprocess.Popen[bytes] | None" = None
    channel: Channel | None = field(default=None, repr=False)
    is_ready: bool = False
    chunk: WorkerChunk | None = None
    next_half: int = 0
    n_failed_starts: int = 0

    def end(self) -> str:
        """Kill it, and the processes that it started; say how it ended."""
        if self.process is None or self.channel is None:
            return "it was not running"
        with suppress(ProcessLookupError, PermissionError):  # macOS refuses it for a process that has ended
            os.killpg(self.process.pid, signal.SIGKILL)  # it leads its group, and is in the system until `wait`
        code = self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.channel.close()
        self.process, self.channel, self.is_ready, self.chunk = None, None, False, None
        return exit_words(code)


@dataclass(frozen=True, slots=True)
class FinishedChunk:
    """A chunk that worker `number` has done, and its answer."""

    number: int
    chunk: WorkerChunk
    answer: ChannelMessage


Give: TypeAlias = Callable[[Channel, WorkerChunk], None]


class WorkerPool:
    """`introduce`: sends a new worker all that it must know before its first chunk, last of all what it answers with
    "ready". `module`: what a worker runs.
    """

    def __init__(
        self,
        devices: Iterable[str],
        introduce: Callable[[Channel, PoolWorker], None],
        module: str = "umbel.sim.engines.workers.worker_process",
    ) -> None:
        self._introduce, self._module = introduce, module
        self._workers = [PoolWorker(number, device) for number, device in enumerate(devices)]
        self._end = weakref.finalize(self, _end_all, self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        """Of the running workers."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def tell(self, send: Callable[[Channel, PoolWorker], None]) -> None:
        """Send something to every running worker."""
        for worker in self._workers:
            if worker.channel is not None:
                with _sending(worker):
                    send(worker.channel, worker)

    def run(self, chunks: Iterable[Indices], n_clients: int, give: Give) -> Iterator[FinishedChunk]:
        """Have all chunks done; in the order in which they finish. `n_clients`: in all of them together.

        While a finished chunk is read, its worker writes the other half of its block.
        """
        waiting = deque(map(WorkerChunk, chunks))
        try:
            while waiting or any(worker.chunk for worker in self._workers):
                for worker in self._workers[:n_clients]:  # start no more workers than there are clients
                    self._employ(worker, waiting, give)
                for worker in self._ready_to_read():
                    yield from self._receive(worker, waiting, give)
        except BaseException:  # interrupted, perhaps in the middle of a message
            self.close()
            raise

    def close(self) -> None:
        """End the workers; the next work starts them again."""
        _end_all(self._workers)

    def _employ(self, worker: PoolWorker, waiting: deque[WorkerChunk], give: Give) -> None:
        """Give an idle worker a chunk, after starting it if it does not run."""
        if not waiting or worker.chunk is not None:
            return
        if worker.channel is None:
            self._begin(worker)
        if not worker.is_ready or worker.channel is None:
            return
        worker.chunk = waiting.popleft()
        worker.chunk.half, worker.next_half = worker.next_half, 1 - worker.next_half
        with _sending(worker):
            give(worker.channel, worker.chunk)

    def _begin(self, worker: PoolWorker) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            worker.process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal reaches only the starter
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)},
            )
        worker.channel = Channel(ours)
        with _sending(worker):
            self._introduce(worker.channel, worker)

    def _ready_to_read(self) -> list[PoolWorker]:
        """Wait until a worker has sent a message or died."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                if worker.channel is not None:
                    selector.register(worker.channel, selectors.EVENT_READ, worker)
            return [key.data for key, _ in selector.select()]

    def _receive(self, worker: PoolWorker, waiting: deque[WorkerChunk], give: Give) -> Iterator[FinishedChunk]:
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
                raise failure_of(message.fields, f"worker {worker.number}")
            case _:
                chunk, worker.chunk = worker.chunk, None
                assert chunk is not None
                self._employ(worker, waiting, give)  # it works while this half of its block is read
                yield FinishedChunk(worker.number, chunk, message)


@contextmanager
def _sending(worker: PoolWorker) -> Generator[None]:
    """Ignore that the worker is gone, which is noticed when it is read. Raises `EngineError` if nothing can be sent for
    another reason, because the worker would wait for ever.
    """
    try:
        yield
    except (BrokenPipeError, ConnectionResetError):
        return
    except OSError as error:
        raise EngineError(f"nothing can be sent to worker {worker.number}: {error}") from error


def _has_died(worker: PoolWorker, waiting: deque[WorkerChunk]) -> None:
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
            f"workers died {_TRIES} times while they worked for the same {counted(len(chunk.positions), 'client')} "
            f"(the last one: {how}); if the clients' own code does not end its process, the machine may be short of "
            "memory: use fewer workers"
        )
    again = counted(len(chunk.positions), "client")
    log.warning("worker %d died (%s); its work for %s is done again", worker.number, how, again)
    waiting.appendleft(chunk)


def failure_of(fields: Mapping[str, Any], where: str) -> EngineError:
    """The error of a worker that answers "failed" with these fields. A whole sentence is passed on as it is."""
    error = EngineError(fields.get("sentence") or f"training failed in {where}: {fields['error']}")
    error.add_note(fields["traceback"])
    return error


def _end_all(workers: list[PoolWorker]) -> None:
    for worker in workers:
        worker.end()
