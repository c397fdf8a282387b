"""`python -m umbel.sim.engines.flower.worker FD`: a process that calls the ClientApps of nodes, over that socket.

It is told the *app*, makes it and answers *ready*. Then it answers *calls* after *calls* with *done*, as
`processes.py` sends and reads them. It ends when its starter ends.
"""

import os
import socket
import sys
import traceback

import torch

from umbel.client.channel import Channel, ChannelMessage
from umbel.sim.engines.flower.nodes import Nodes, copied
from umbel.sim.engines.flower.pieces import read_pieces, record_of
from umbel.sim.engines.flower.processes import send_answers
from umbel.sim.engines.flower.work import NodeAnswer, NodeApp, NodeCall, SentContent
from umbel.sim.engines.work import EngineError
from umbel.sim.processes import kill_own_group, when_the_starter_is_gone


class _Worker:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._nodes: Nodes | None = None
        self._contents: dict[int, SentContent] = {}  # of the last calls

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
        self._read_contents(message)
        answers = list[tuple[NodeAnswer, list[bytes]]]()
        for fields, state in zip(message.fields["calls"], message.arrays, strict=True):
            content = self._contents[fields["content"]]
            call = NodeCall(fields["number"], content, fields["metadata"], fields["seed"], state.tobytes())
            answers.append(self._nodes.answer(call, copied(content.record)))
        send_answers(self._channel, answers)

    def _read_contents(self, message: ChannelMessage) -> None:
        """Keep the contents of these calls, and no others."""
        found = dict[int, SentContent]()
        for (number, lengths), fd in zip(message.fields["contents"], message.fds, strict=True):
            known = self._contents.get(number)
            found[number] = known or SentContent(number, record_of(read_pieces(fd, lengths)))
            os.close(fd)
        self._contents = found


def main() -> None:
    when_the_starter_is_gone(kill_own_group)
    os.dup2(2, 1)  # what the app prints belongs to the log
    torch.set_num_threads(1)
    try:
        _Worker(Channel(socket.socket(fileno=int(sys.argv[1])))).serve()
    except (EOFError, OSError):
        return  # the starter has closed its end


if __name__ == "__main__":
    main()
