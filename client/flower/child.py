"""`python -m umbel.client.flower.child FD`: a process with one ClientApp, over that socket.

It is told which app, makes it, and answers each *call* with an *answer*, or *failed* and the reason. A process of its
own, because a call of a ClientApp cannot be asked to stop: then this process is killed. It ends when its starter ends.
"""

import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from umbel.client.channel import Channel
from umbel.client.flower.calls import AppFailed, Call, FirstMessage
from umbel.client.flower.host import AppHost, load_object
from umbel.client.local.devices import seed_generators
from umbel.client.user_code import where_raised


def serve(channel: Channel) -> None:
    """Answer until the other end is gone, which raises `EOFError`."""
    host: AppHost | None = None
    while True:
        message = channel.receive()
        try:
            match message.kind:
                case "app":
                    host = _made(message.fields)
                    channel.send("ready", {"kinds": host.kinds})
                case "first":
                    _tell_first(channel, message.fields)
                case _:
                    assert host is not None, "the app is sent first"
                    channel.send("answer", *host.answer(Call.of(message)).packed())
        except AppFailed as error:
            channel.send("failed", {"what": str(error), "public": error.public, "traceback": ""})
        except (Exception, SystemExit) as error:  # whatever the app raises
            channel.send("failed", _failure(error))


def _made(fields: Mapping[str, Any]) -> AppHost:
    from flwr.clientapp import ClientApp

    app = load_object(fields["app"], ClientApp, Path(fields["folder"]))
    return AppHost(app, fields["run_config"], fields["node_config"])


def _tell_first(channel: Channel, fields: Mapping[str, Any]) -> None:
    """Send the first message of the project's ServerApp, and end. Raises `AppFailed` if it sends none."""
    from flwr.serverapp import ServerApp

    from umbel.client.flower.server_app import first_message_of

    only_one = threading.Lock()  # a legacy strategy sends from several threads

    def tell(first: FirstMessage) -> None:
        only_one.acquire()
        told = {"config": dict(first.config), "names": [*first.arrays], "strategy": first.strategy}
        channel.send("first", told, [*first.arrays.values()])
        os._exit(0)  # the ServerApp would wait for replies

    logging.getLogger("flwr").setLevel(logging.WARNING)  # it would tell of rounds that never are
    app = load_object(fields["server"], ServerApp, Path(fields["folder"]))
    seed_generators(fields["seed"])
    first_message_of(app, fields["run_config"], tell, lambda: _made(fields))
    raise AppFailed("the ServerApp ended without a message that asks clients to train", "")


def _failure(error: BaseException) -> dict[str, Any]:
    """The error's message may quote data, so the coordinator sees only its type."""
    return {
        "what": f"the Flower app failed with {where_raised(error)}",
        "public": f"the client's own code failed with {type(error).__name__}; see the client's log",
        "traceback": "".join(traceback.format_exception(error)),
    }


def _end_with_the_starter() -> None:
    """Standard input is a pipe that the starter never writes to: it closes with the starter, however that ends."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(0, signal.SIGKILL)  # and what the app has started

    threading.Thread(target=watch, name="tether", daemon=True).start()


def main() -> None:
    _end_with_the_starter()
    os.dup2(2, 1)  # what the app prints belongs to the log
    try:
        serve(Channel(socket.socket(fileno=int(sys.argv[1]))))
    except (EOFError, OSError):
        return  # the starter has closed its end


if __name__ == "__main__":
    main()
