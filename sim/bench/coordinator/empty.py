"""The limits beside a coordinator: the same server program with an application that does nothing.

`python -m umbel.sim.bench.coordinator.empty asgi` answers every request with an empty 200: the limit of a round.
`... empty fastapi` is the limit under load, an empty FastAPI endpoint on uvicorn, uvloop and httptools, in one process,
without access log. It has the address of a check-in, is sent the same bytes, reads none of them, and answers `{}`.
Both print their address.
"""

import os
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from umbel.sim.processes import when_the_starter_is_gone

Message = MutableMapping[str, Any]
_BACKLOG = 2048


async def answer_nothing(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    """An ASGI application: reads the body, answers 200."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def _no_fields() -> dict[str, str]:
    return {}


def main() -> None:
    """Listen on a free port of the loopback interface until the starter is gone."""
    import uvicorn
    from fastapi import FastAPI

    when_the_starter_is_gone(lambda: os._exit(0))
    config = uvicorn.Config(answer_nothing, log_level="warning", access_log=False, lifespan="off")
    if sys.argv[1] == "fastapi":
        app = FastAPI()
        app.post("/v1/check-ins")(_no_fields)
        config = uvicorn.Config(app, log_level="warning", access_log=False, loop="uvloop", http="httptools")
    with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
