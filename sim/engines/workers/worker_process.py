"""`python -m umbel.sim.engines.workers.worker_process FD`: a worker of the engine "processes", over that socket.

It receives, in this order, the *model* to make, the *samples* of all clients, its *block* for changes and the *start*
of the cohorts, the last three as shared memory. Then it receives *chunk* after chunk of clients, and answers each with
*done* and the losses, or *failed* and the reason. It ends when its starter ends, even in the middle of a step.
"""

import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.population import CohortData
from umbel.sim.engines.device import whole_float32
from umbel.sim.engines.model import ModelRecipe
from umbel.sim.engines.training import LocalTrainer, Losses
from umbel.sim.engines.work import CohortWork
from umbel.sim.engines.workers.channel import Channel, SharedTensor, WorkerMessage, mapped
from umbel.sim.processes import when_the_starter_is_gone


def send_model(channel: Channel, recipe: ModelRecipe, device: str, arithmetic: str) -> None:
    channel.send("model", {"recipe": recipe.to_json(), "device": device, "arithmetic": arithmetic})


def send_shared(channel: Channel, kind: str, *shared: SharedTensor) -> None:
    """`kind`: "samples" (inputs and targets), "block" or "start"."""
    described = [[str(one.tensor.dtype).removeprefix("torch."), list(one.tensor.shape)] for one in shared]
    channel.send(kind, {"tensors": described}, fds=[one.fd for one in shared])


def send_chunk(channel: Channel, cohort: int, half: int, part: CohortWork) -> None:
    """`cohort`: a new number for each cohort; `half`: of the block, for the changes."""
    channel.send(
        "chunk",
        {"cohort": cohort, "half": half, "terms": part.terms},
        [part.data.rows, part.data.starts, part.seeds, part.steps],
    )


class Worker:
    """Carries out the messages."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._trainer: LocalTrainer | None = None
        self._shared = dict[str, list[Tensor]]()
        self._cohort: int | None = None

    def serve(self) -> None:
        """Until the other end is gone, which raises `EOFError`."""
        while True:
            message = self._channel.receive()
            try:
                self._handle(message)
            except Exception as error:  # whatever the user's model raises
                reason = "".join(traceback.format_exception(error))
                self._channel.send("failed", {"error": f"{type(error).__name__}: {error}", "traceback": reason})

    def _handle(self, message: WorkerMessage) -> None:
        match message.kind:
            case "model":
                self._make(message.fields)
                self._channel.send("ready", {})
            case "chunk":
                losses = self._train(message.fields, message.arrays)
                self._channel.send("done", {}, [losses])
            case kind:
                self._shared[kind] = _mapped(message)
                self._cohort = None

    def _make(self, fields: Mapping[str, Any]) -> None:
        self._trainer = LocalTrainer(ModelRecipe.from_json(fields["recipe"]), fields["device"], fields["arithmetic"])

    def _train(self, fields: Mapping[str, Any], arrays: Sequence[NDArray[Any]]) -> Losses:
        assert self._trainer is not None
        rows, starts, seeds, steps = arrays
        data = CohortData(SampleSet(*self._shared["samples"]), rows, starts)
        work = CohortWork.on(data, seeds, steps, fields["terms"])
        if self._cohort != fields["cohort"]:
            self._trainer.begin(self._shared["start"][0], work)
            self._cohort = fields["cohort"]
        with whole_float32(self._trainer.device):
            return self._trainer.train(work, np.arange(len(seeds)), self._shared["block"][0][fields["half"]])


def _mapped(message: WorkerMessage) -> list[Tensor]:
    tensors = list[Tensor]()
    for (name, shape), fd in zip(message.fields["tensors"], message.fds, strict=True):
        tensors.append(mapped(fd, shape, getattr(torch, name)))
        os.close(fd)
    return tensors


def main() -> None:
    when_the_starter_is_gone(lambda: os._exit(1))
    torch.set_num_threads(1)
    try:
        Worker(Channel(socket.socket(fileno=int(sys.argv[1])))).serve()
    except (EOFError, OSError):
        return  # the starter has closed its end


if __name__ == "__main__":
    main()
