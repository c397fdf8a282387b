"""Divides real clients among worker processes: the engine "processes" of an experiment with an app.

A worker makes clients from the app's name when they are first needed (`client_worker.py`). The model, the samples and
the blocks of changes are shared memory, as for `ProcessesEngine`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from umbel.aggregation.model.artifact import encode_model
from umbel.client.channel import Channel
from umbel.sim.data.partition.partition import Indices
from umbel.sim.engines.clients.app import ClientApp
from umbel.sim.engines.clients.messages import Arrays, packed_group, packed_work, unpacked_reports
from umbel.sim.engines.clients.work import ClientGroup, ClientReport, ClientsWork, GlobalModel, TrainedClients
from umbel.sim.engines.device import chunks, devices_of, rows_of_block
from umbel.sim.engines.workers.pool import FinishedChunk, PoolWorker, WorkerChunk, WorkerPool
from umbel.sim.engines.workers.processes import SharedSamples
from umbel.sim.engines.workers.worker_process import SharedTensor, send_shared

Packed = tuple[dict[str, Any], Arrays]


class ClientProcesses:
    """`n_alive`: clients in the memory of each worker; None: as many as fit. `n_workers`: default one for each core."""

    name = "processes"

    def __init__(self, app: ClientApp, n_alive: int | None = None, n_workers: int | None = None, why: str = "") -> None:
        self.why = why
        self._app, self._n_alive = app, n_alive
        self._samples = SharedSamples()
        self._model: SharedTensor | None = None
        self._blocks: list[SharedTensor] = []
        self._pool = WorkerPool(devices_of("cpu", n_workers), self._introduce)

    @property
    def pids(self) -> list[int]:
        """Of the running workers."""
        return self._pool.pids

    def sizes(self, group: ClientGroup) -> Indices:
        found = np.zeros(len(group), dtype=np.int64)
        for done in self._run("sizes", group, lambda at: packed_group(group.part(at))):
            (found[done.chunk.positions],) = done.answer.arrays
        return found

    def train(self, model: GlobalModel, work: ClientsWork) -> Iterator[TrainedClients]:
        self._take(model)
        for done in self._run("train", work.group, lambda at: packed_work(work.part(at))):
            positions = done.chunk.positions
            values = self._blocks[done.number].tensor[done.chunk.half, : len(positions)]
            yield TrainedClients(positions, values, unpacked_reports("train", done.answer.fields["reports"]))

    def measure(self, model: GlobalModel, work: ClientsWork) -> list[ClientReport]:
        self._take(model)
        found = dict[int, ClientReport]()
        for done in self._run("measure", work.group, lambda at: packed_work(work.part(at))):
            reports = unpacked_reports("measure", done.answer.fields["reports"])
            found |= dict(zip(done.chunk.positions.tolist(), reports, strict=True))
        return [found[position] for position in range(len(work))]

    def close(self) -> None:
        """End the workers; other work starts them again."""
        self._pool.close()

    def _run(self, job: str, group: ClientGroup, packed: Callable[[Indices], Packed]) -> Iterator[FinishedChunk]:
        if group.train is not None and self._samples.take(group.train.samples):
            self._pool.tell(lambda channel, _: self._samples.send(channel))

        def give(channel: Channel, chunk: WorkerChunk) -> None:
            fields, arrays = packed(chunk.positions)
            channel.send("clients", {**fields, "job": job, "half": chunk.half}, arrays)

        n_rows = self._blocks[0].tensor.shape[1] if self._blocks else len(group)
        return self._pool.run(chunks(group.effort, len(self._pool), max(1, n_rows)), len(group), give)

    def _take(self, model: GlobalModel) -> None:
        """Share the model, and with the first one the blocks."""
        body = torch.frombuffer(
            bytearray(encode_model(model.layout.full_state(model.owned), model.layout)), dtype=torch.uint8
        )
        self._model = SharedTensor.of(body)
        if not self._blocks:
            shape = 2, rows_of_block(model.n_sent), model.n_sent
            self._blocks = [SharedTensor(shape, torch.float32) for _ in range(len(self._pool))]
            self._pool.tell(self._send_block)
        self._pool.tell(self._send_model)

    def _introduce(self, channel: Channel, worker: PoolWorker) -> None:
        app = {"app": self._app.to_json(), "n_alive": self._n_alive, "n_processes": len(self._pool)}
        channel.send("app", app)
        self._samples.send(channel)
        self._send_block(channel, worker)
        self._send_model(channel, worker)

    def _send_block(self, channel: Channel, worker: PoolWorker) -> None:
        if self._blocks:
            send_shared(channel, "block", self._blocks[worker.number])

    def _send_model(self, channel: Channel, _: PoolWorker) -> None:
        if self._model is not None:
            send_shared(channel, "model of clients", self._model)
