"""A peer's work, as its own interpreter reads it, and its report.

A copy of this file lies beside the peer's program, whose interpreter has no umbel, so it imports only numpy and torch.
A *turn* is the work of one client in one round; turns are counted from 0, round after round. The samples of each step
are listed, so that nothing is drawn and all sides train the same batches.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

ARRAYS_FILE, WORDS_FILE, REPORT_FILE = "work.npz", "work.json", "report.npz"


class PeerWork:
    """The work that `write_work` has written into a folder.

    `start`: the first weights, one vector in the order of `parameters()`; `clients`: of each round, (rounds, asked);
    `sizes`: samples of each turn; `words`: `layers`, `learning_rate`, `n_clients` and `n_processes`.
    """

    def __init__(self, folder: Path) -> None:
        self.words: dict[str, Any] = json.loads((folder / WORDS_FILE).read_text())
        with np.load(folder / ARRAYS_FILE) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        self.start, self.clients, self.sizes = tensors["start"], tensors["clients"], tensors["sizes"]
        self.n_rounds, self.n_asked = self.clients.shape
        self._inputs, self._targets, self._rows = tensors["inputs"], tensors["targets"], tensors["rows"]
        self._step_ends: list[int] = [0, *tensors["step_ends"].tolist()]
        self._turn_ends: list[int] = [0, *tensors["turn_ends"].tolist()]

    @cached_property
    def model(self) -> nn.Sequential:
        """The one module; its weights change."""
        return nn.Sequential(*(getattr(nn, kind)(**arguments) for kind, arguments in self.words["layers"]))

    @cached_property
    def _optimizer(self) -> torch.optim.SGD:
        return torch.optim.SGD(self.model.parameters(), lr=self.words["learning_rate"])

    def batches(self, turn: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of each step, of all epochs."""
        for step in range(self._turn_ends[turn], self._turn_ends[turn + 1]):
            rows = self._rows[self._step_ends[step] : self._step_ends[step + 1]]
            yield self._inputs[rows], self._targets[rows]

    def trained(self, start: Tensor, turn: int) -> Tensor:
        """The weights after a turn from `start`, as vectors."""
        self.load(start)
        for inputs, targets in self.batches(turn):
            self._optimizer.zero_grad()
            functional.cross_entropy(self.model(inputs), targets).backward()
            self._optimizer.step()
        return self.weights()

    def load(self, weights: Tensor) -> None:
        """Into `model`."""
        with torch.no_grad():
            nn.utils.vector_to_parameters(weights.clone(), self.model.parameters())

    def weights(self) -> Tensor:
        """Of `model`, copied."""
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


def write_work(folder: Path, arrays: Mapping[str, Any], words: Mapping[str, Any]) -> None:
    """`arrays` and `words`: what `PeerWork` reads."""
    np.savez(folder / ARRAYS_FILE, **arrays)
    (folder / WORDS_FILE).write_text(json.dumps(words))


def write_report(folder: Path, times: Sequence[float], weights: Tensor) -> None:
    """`times`: when the first round began, and when each ended, by `time.time`; `weights`: after the last."""
    unfinished = folder / f"unfinished-{REPORT_FILE}"
    np.savez(unfinished, times=np.array(times), weights=weights.numpy())
    os.replace(unfinished, folder / REPORT_FILE)
