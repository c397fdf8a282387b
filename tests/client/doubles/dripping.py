"""A server that answers every request with the same head and then sends its body piece by piece, on a real socket."""

import socketserver
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"


@contextmanager
def dripping(piece: bytes, head: bytes = HEAD, pause_s: float = 0.02) -> Generator[str]:
    """The server's address. It sends `piece` again and again, until the client leaves."""
    ended = threading.Event()

    class Adapter(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            try:
                self.request.sendall(head)
                while not ended.wait(pause_s):
                    self.request.sendall(piece)
            except OSError:
                pass  # the client has left

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Adapter) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            host, port = cast(tuple[str, int], server.server_address)
            yield f"http://{host}:{port}"
        finally:
            ended.set()
            server.shutdown()
            thread.join()
