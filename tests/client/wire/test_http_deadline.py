"""A coordinator that keeps an exchange alive without ever ending it."""

import socket
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import pytest

from tests.servers.waits import LIMIT_S
from umbel.client.errors import CoordinatorUnreachable
from umbel.client.wire.http_deadline import timed_by
from umbel.client.wire.timing import Backoff, Timing
from umbel.client.wire.transport import Transport, connect


@contextmanager
def hostile(first: bytes, again: bytes) -> Generator[str]:
    """The address of a server that answers with `first` and then, every 50 ms, with `again`.

    The client has to leave; it fails if the server had to.
    """
    ended, ends_at = threading.Event(), time.monotonic() + LIMIT_S
    is_left = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                try:
                    connection.sendall(first)
                    while not ended.wait(0.05) and time.monotonic() < ends_at:
                        connection.sendall(again)
                except OSError:
                    is_left.set()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            assert is_left.wait(LIMIT_S), "the client did not leave"
        finally:
            ended.set()
            thread.join()


def unsigned(_target: object, _body: bytes) -> Mapping[str, str]:
    return {}


HOSTILE = [
    (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b" "),
    (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
]


@pytest.mark.parametrize(("first", "again"), HOSTILE)
def test_an_exchange_that_never_ends_is_ended(first: bytes, again: bytes) -> None:
    short = Timing(answer_s=0.2, stall_s=3.0, backoff=Backoff())
    with hostile(first, again) as url, connect(url) as http, timed_by(short), pytest.raises(CoordinatorUnreachable):
        Transport(http, unsigned).ask("GET", "/v1/check-ins")


def test_a_download_ends_with_its_window() -> None:
    with hostile(*HOSTILE[0]) as url, connect(url) as http:
        transport, until = Transport(http, unsigned), time.monotonic() + 0.4

        def download() -> None:
            with transport.stream("GET", "/v1/models/0", until=until) as response:
                for _ in response.iter_raw():
                    pass

        with pytest.raises(CoordinatorUnreachable):
            download()
