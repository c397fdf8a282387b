"""Divides the nodes among worker processes.

A worker gets *calls*, a few at once, and answers *done*. Contents, and replies with large arrays, are shared memory.
"""

import os
from collections import Counter
from collections.abc import Generator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from umbel.client.channel import Channel, ChannelMessage
from umbel.sim.engines.device import devices_of
from umbel.sim.engines.flower.pieces import SharedPieces, read_pieces, record_of
from umbel.sim.engines.flower.work import NodeAnswer, NodeApp, NodeCall
from umbel.sim.engines.workers.pool import PoolWorker, WorkerChunk, WorkerPool

_CALLS_MAX = 8  # at once: each may have its own content, and a message carries at most eight descriptors
_CHUNKS_EACH = 6  # for a worker in a cohort, so that all end at about the same time
_SMALL_BYTES = 1 << 16  # less goes through the socket


class NodeProcesses:
    """The engine "processes". `n_workers`: default one for each core."""

    name = "processes"

    def __init__(self, app: NodeApp, n_workers: int | None = None, why: str = "") -> None:
        self.why = why
        self._app = app
        self._pool = WorkerPool(devices_of("cpu", n_workers), self._introduce, "umbel.sim.engines.flower.worker")

    @property
    def pids(self) -> list[int]:
        """Of the running workers."""
        return self._pool.pids

    def run(self, calls: Sequence[NodeCall]) -> Generator[tuple[int, NodeAnswer]]:
        # Calls with the same content follow one another, so few contents are open at once.
        order = np.argsort([call.content.number for call in calls], kind="stable")
        n_left = Counter(call.content.number for call in calls)  # that have not been sent

        def give(channel: Channel, chunk: WorkerChunk) -> None:
            sent = [calls[position] for position in chunk.positions.tolist()]
            try:
                send_calls(channel, sent)
            finally:
                n_left.subtract(call.content.number for call in sent)
                for call in sent:
                    if n_left[call.content.number] <= 0:  # less than 0: sent again, after a worker died
                        call.content.close()

        n_each = min(_CALLS_MAX, max(1, len(calls) // (_CHUNKS_EACH * len(self._pool))))
        chunks = (order[start : start + n_each] for start in range(0, len(calls), n_each))
        for done in self._pool.run(chunks, len(calls), give):
            yield from zip(done.chunk.positions.tolist(), answers_of(done.answer), strict=True)

    def close(self) -> None:
        self._pool.close()

    def _introduce(self, channel: Channel, _: PoolWorker) -> None:
        channel.send("app", self._app.to_json())


def send_calls(channel: Channel, calls: Sequence[NodeCall]) -> None:
    """Each content once: a worker reads it once, however many of its nodes get it."""
    contents = {call.content.number: call.content for call in calls}
    fields = {
        "calls": [
            {"number": call.number, "metadata": dict(call.metadata), "seed": call.seed, "content": call.content.number}
            for call in calls
        ],
        "contents": [[number, one.shared.lengths] for number, one in contents.items()],
    }
    states = [_as_array(call.state) for call in calls]
    channel.send("calls", fields, states, fds=[one.shared.fd for one in contents.values()])


def send_answers(channel: Channel, answers: Sequence[tuple[NodeAnswer, Sequence[bytes]]]) -> None:
    """Answers, with the pieces of their contents."""
    described = [
        {"error": None if one.error is None else list(one.error), "n_pieces": len(pieces)} for one, pieces in answers
    ]
    states, pieces = [_as_array(one.state) for one, _ in answers], [piece for _, own in answers for piece in own]
    if sum(map(len, pieces)) < _SMALL_BYTES:
        channel.send("done", {"answers": described}, [*states, *map(_as_array, pieces)])
        return
    shared = SharedPieces(pieces)
    channel.send("done", {"answers": described, "lengths": shared.lengths}, states, fds=[shared.fd])


def answers_of(message: ChannelMessage) -> list[NodeAnswer]:
    """What `send_answers` has sent."""
    described = message.fields["answers"]
    states = [array.tobytes() for array in message.arrays[: len(described)]]
    if message.fds:
        (fd,) = message.fds
        pieces = iter(read_pieces(fd, message.fields["lengths"]))
        os.close(fd)
    else:
        pieces = iter([array.tobytes() for array in message.arrays[len(described) :]])
    found = list[NodeAnswer]()
    for fields, state in zip(described, states, strict=True):
        own = list(islice(pieces, fields["n_pieces"]))
        error = fields["error"]
        found.append(
            NodeAnswer(record_of(own) if own else None, state, None if error is None else (error[0], error[1]))
        )
    return found


def _as_array(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)
