"""Divides the nodes among worker processes."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from umbel.client.channel import Channel
from umbel.sim.engines.device import devices_of
from umbel.sim.engines.flower.work import NodeAnswer, NodeApp, NodeCall, unpacked
from umbel.sim.engines.workers.pool import PoolWorker, WorkerChunk, WorkerPool


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

    def run(self, calls: Sequence[NodeCall]) -> Iterator[tuple[int, NodeAnswer]]:
        def give(channel: Channel, chunk: WorkerChunk) -> None:
            _send(channel, calls[int(chunk.positions[0])])

        each = (np.array([position]) for position in range(len(calls)))
        for done in self._pool.run(each, len(calls), give):
            yield int(done.chunk.positions[0]), _answer(done.answer.fields, done.answer.arrays)

    def close(self) -> None:
        self._pool.close()

    def _introduce(self, channel: Channel, _: PoolWorker) -> None:
        channel.send("app", self._app.to_json())


def _send(channel: Channel, call: NodeCall) -> None:
    """The content as shared memory: each worker reads it once, however many of its nodes get it."""
    content = call.content
    fields = {"number": call.number, "metadata": dict(call.metadata), "seed": call.seed, "content": content.number}
    fields["length"] = len(content.shared.tensor)
    channel.send("call", fields, [np.frombuffer(call.state, np.uint8)], fds=[content.shared.fd])


def _answer(fields: Any, arrays: Sequence[Any]) -> NodeAnswer:
    state, content = (array.tobytes() for array in arrays)
    if (error := fields["error"]) is not None:
        return NodeAnswer(None, state, (error["code"], error["reason"]))
    return NodeAnswer(unpacked(content), state)
