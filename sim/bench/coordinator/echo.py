"""The physical limit beside a coordinator: the same server program with an application that does nothing.

`python -m umbel.sim.bench.coordinator.echo` prints its address and answers every request with an empty 200.
"""

import os
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from umbel.sim.processes import when_the_starter_is_gone

Message = MutableMapping[str, Any]


async def answer_nothing(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    """An ASGI application: reads the body, says 200."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def main() -> None:
    """Listen on a free port of the loopback interface until the starter is gone."""
    import uvicorn

    when_the_starter_is_gone(lambda: os._exit(0))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        config = uvicorn.Config(answer_nothing, log_level="warning", access_log=False, lifespan="off")
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
