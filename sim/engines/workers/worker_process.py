"""`python -m umbel.sim.engines.workers.worker_process FD`: a worker of the engine "processes", over that socket.

For an app of the user's own clients see `client_worker.py`. Else it receives, in this order, the *model* to make, the
*samples* of all clients, its *block* for changes and the *start* of the cohorts, the last three as shared memory.
Then it receives *chunk* after chunk of clients, and answers each with *done* and the losses, or *failed* and the
reason. It ends when its starter ends, even in the middle of a step.

Messages are those of `client/channel.py`. Shared memory has no name, only a file descriptor, which goes to another
process in a message. It ends with its last holder, so even a killed process leaves nothing behind.
"""

import mmap
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umbel.client.channel import Channel, ChannelMessage
from umbel.client.local.devices import whole_float32
from umbel.sim.data.data_set import SampleSet
from umbel.sim.data.population import CohortData
from umbel.sim.engines.model import ModelRecipe
from umbel.sim.engines.training import LocalTrainer, Losses
from umbel.sim.engines.work import CohortWork
from umbel.sim.engines.workers.client_worker import ClientWorker
from umbel.sim.processes import kill_own_group, when_the_starter_is_gone


class SharedTensor:
    """A tensor in shared memory. `fd` can be sent; after `close` the tensor stays usable."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        n_bytes = prod(shape) * dtype.itemsize
        self.fd = _nameless(max(n_bytes, 1))
        self.tensor = mapped(self.fd, shape, dtype)

    @classmethod
    def of(cls, tensor: Tensor) -> "SharedTensor":
        """A copy of `tensor`."""
        shared = cls(tensor.shape, tensor.dtype)
        shared.tensor.copy_(tensor)
        return shared

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def __del__(self) -> None:
        self.close()


def mapped(fd: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The shared tensor behind a descriptor, which can be closed afterwards."""
    if prod(shape) == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(mmap.mmap(fd, prod(shape) * dtype.itemsize), dtype=dtype).view(tuple(shape))


def _nameless(n_bytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("umbel")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, n_bytes)
    return fd


def send_model(channel: Channel, recipe: ModelRecipe, device: str, arithmetic: str) -> None:
    channel.send("model", {"recipe": recipe.to_json(), "device": device, "arithmetic": arithmetic})


def send_shared(channel: Channel, kind: str, *shared: SharedTensor) -> None:
    """`kind`: "samples" (inputs and targets), "block", "start", or "model of clients"."""
    described = [[str(one.tensor.dtype).removeprefix("torch."), list(one.tensor.shape)] for one in shared]
    channel.send(kind, {"tensors": described}, fds=[one.fd for one in shared])


def send_chunk(channel: Channel, cohort: int, half: int, part: CohortWork) -> None:
    """`cohort`: a new number for each cohort; `half`: of the block, for the changes."""
    channel.send(
        "chunk",
        {"cohort": cohort, "half": half, "terms": part.terms},
        [part.data.rows, part.data.starts, *part.arrays],
    )


class Worker:
    """Carries out the messages."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._trainer: LocalTrainer | None = None
        self._clients: ClientWorker | None = None
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

    def _handle(self, message: ChannelMessage) -> None:
        match message.kind:
            case "model":
                self._make(message.fields)
                self._channel.send("ready", {})
            case "chunk":
                losses = self._train(message.fields, message.arrays)
                self._channel.send("done", {}, [losses])
            case "app":
                self._clients = ClientWorker(message.fields)
                self._channel.send("ready", {})
            case "clients":
                assert self._clients is not None, "the app is sent first"
                self._channel.send(*self._clients.answer(message.fields, message.arrays))
            case kind if self._clients is not None:
                self._clients.take(kind, _mapped(message))
            case kind:
                self._shared[kind] = _mapped(message)
                self._cohort = None

    def _make(self, fields: Mapping[str, Any]) -> None:
        self._trainer = LocalTrainer(ModelRecipe.from_json(fields["recipe"]), fields["device"], fields["arithmetic"])

    def _train(self, fields: Mapping[str, Any], arrays: Sequence[NDArray[Any]]) -> Losses:
        assert self._trainer is not None
        rows, starts, *of_clients = arrays
        data = CohortData(SampleSet(*self._shared["samples"]), rows, starts)
        work = CohortWork.on(data, of_clients, fields["terms"])
        if self._cohort != fields["cohort"]:
            self._trainer.begin(self._shared["start"][0], work)
            self._cohort = fields["cohort"]
        with whole_float32(self._trainer.device):
            return self._trainer.train(work, np.arange(len(work.steps)), self._shared["block"][0][fields["half"]])


def _mapped(message: ChannelMessage) -> list[Tensor]:
    tensors = list[Tensor]()
    for (name, shape), fd in zip(message.fields["tensors"], message.fds, strict=True):
        tensors.append(mapped(fd, shape, getattr(torch, name)))
        os.close(fd)
    return tensors


def main() -> None:
    when_the_starter_is_gone(kill_own_group)
    torch.set_num_threads(1)
    try:
        Worker(Channel(socket.socket(fileno=int(sys.argv[1])))).serve()
    except (EOFError, OSError):
        return  # the starter has closed its end


if __name__ == "__main__":
    main()
