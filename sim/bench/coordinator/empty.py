"""The limit beside a coordinator under load: an empty FastAPI endpoint, served as anyone would serve it.

`python -m umbel.sim.bench.coordinator.empty` prints its address. uvicorn, uvloop, httptools, one process, no access
log; the endpoint has the address of a check-in, is sent the same bytes, looks at none of them, and answers `{}`.
"""

import os
import socket

from umbel.sim.processes import when_the_starter_is_gone


def main() -> None:
    """Listen on a free port of the loopback interface until the starter is gone."""
    import uvicorn
    from fastapi import FastAPI

    app = FastAPI()

    async def empty() -> dict[str, str]:
        return {}

    app.post("/v1/check-ins")(empty)
    when_the_starter_is_gone(lambda: os._exit(0))
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        config = uvicorn.Config(app, log_level="warning", access_log=False, loop="uvloop", http="httptools")
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
