"""Runs real clients one after another in this process: the engine "sequential" of an experiment with an app."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from umbel.client.local.devices import generators, set_generators
from umbel.sim.data.partition.partition import Indices
from umbel.sim.engines.clients.alive import LiveClients
from umbel.sim.engines.clients.app import ClientApp
from umbel.sim.engines.clients.trainer import ClientTrainer
from umbel.sim.engines.clients.work import ClientGroup, ClientReport, ClientsWork, GlobalModel, TrainedClients
from umbel.sim.engines.device import CPU, one_thread, rows_of_block


class SequentialClients:
    """`n_alive`: how many clients may be in memory; None: as many as fit."""

    name = "sequential"

    def __init__(self, app: ClientApp, n_alive: int | None = None, why: str = "") -> None:
        self.why = why
        self._trainer = ClientTrainer(LiveClients(app, n_alive))
        self._block = torch.empty(0, 0)

    def sizes(self, group: ClientGroup) -> Indices:
        with _undisturbed():
            return np.array(self._trainer.sizes(group), dtype=np.int64)

    def train(self, model: GlobalModel, work: ClientsWork) -> Iterator[TrainedClients]:
        self._trainer.begin(model)
        n_rows, n_values = min(len(work), rows_of_block(model.n_sent)), model.n_sent
        if self._block.shape != (n_rows, n_values):
            self._block = torch.empty(n_rows, n_values)
        for first in range(0, len(work), max(1, n_rows)):
            positions = np.arange(first, min(first + n_rows, len(work)))
            with _undisturbed():
                reports = [self._trainer.train(work, p, self._block[p - first]) for p in positions.tolist()]
            yield TrainedClients(positions, self._block[: len(positions)], reports)

    def measure(self, model: GlobalModel, work: ClientsWork) -> list[ClientReport]:
        self._trainer.begin(model)
        with _undisturbed():
            return [self._trainer.measure(work, position) for position in range(len(work))]

    def close(self) -> None:
        """Nothing is held but memory."""


@contextmanager
def _undisturbed() -> Generator[None]:
    """Compute on one thread, so that all engines give the same bits, and restore the process's generators after it."""
    before = generators(CPU)
    try:
        with one_thread():
            yield
    finally:
        set_generators(before, CPU)
