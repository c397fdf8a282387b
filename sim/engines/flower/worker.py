"""`python -m umbel.sim.engines.flower.worker FD`: a process that calls the ClientApps of nodes, over that socket.

It is told the *app*, makes it and answers *ready*. Then it answers *call* after *call* with *done*. The content of a
call is shared memory. It ends when its starter ends.
"""

import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict

from umbel.client.channel import Channel, ChannelMessage
from umbel.sim.engines.flower.nodes import Nodes, copied
from umbel.sim.engines.flower.work import NodeApp, NodeCall, SentContent, packed, unpacked
from umbel.sim.engines.work import EngineError
from umbel.sim.engines.workers.worker_process import mapped
from umbel.sim.processes import when_the_starter_is_gone


class _Worker:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._nodes: Nodes | None = None
        self._content: SentContent | None = None  # of the last call

    def serve(self) -> None:
        """Until the other end is gone, which raises `EOFError`."""
        while True:
            message = self._channel.receive()
            try:
                self._handle(message)
            except EngineError as error:
                reason = "".join(traceback.format_exception(error))
                self._channel.send("failed", {"sentence": str(error), "traceback": reason})

    def _handle(self, message: ChannelMessage) -> None:
        if message.kind == "app":
            self._nodes = Nodes(NodeApp(**message.fields))
            self._channel.send("ready", {})
            return
        assert self._nodes is not None, "the app is sent first"
        call = self._call(message.fields, message.arrays, message.fds)
        answer = self._nodes.answer(call, copied(call.content.record))
        content = b"" if answer.content is None else packed(answer.content)
        error = None if answer.error is None else {"code": answer.error[0], "reason": answer.error[1]}
        self._channel.send("done", {"error": error}, [np.frombuffer(one, np.uint8) for one in (answer.state, content)])

    def _call(self, fields: Mapping[str, Any], arrays: Sequence[Any], fds: Sequence[int]) -> NodeCall:
        (fd,) = fds
        if self._content is None or self._content.number != fields["content"]:
            self._content = SentContent(fields["content"], _read(fd, fields["length"]))
        os.close(fd)
        return NodeCall(fields["number"], self._content, fields["metadata"], fields["seed"], arrays[0].tobytes())


def _read(fd: int, n_bytes: int) -> RecordDict:
    return unpacked(mapped(fd, [n_bytes], torch.uint8).numpy().tobytes())


def main() -> None:
    when_the_starter_is_gone(lambda: os._exit(1))
    os.dup2(2, 1)  # what the app prints belongs to the log
    torch.set_num_threads(1)
    try:
        _Worker(Channel(socket.socket(fileno=int(sys.argv[1])))).serve()
    except (EOFError, OSError):
        return  # the starter has closed its end


if __name__ == "__main__":
    main()
