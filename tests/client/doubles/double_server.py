"""The coordinator in memory behind a real socket, for clients in processes of their own."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from tests.client.doubles.double import Handler


@contextmanager
def served(handle: Handler) -> Generator[str]:
    """The address at which `handle` answers."""

    class Adapter(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            url = f"http://{self.headers['host']}{self.path}"
            answer = handle(httpx.Request(self.command, url, headers=list(self.headers.items()), content=body))
            content = answer.read()
            self.send_response(answer.status_code)
            for name, value in answer.headers.items():
                if name != "transfer-encoding":
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_any

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the test says what happened."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Adapter)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
