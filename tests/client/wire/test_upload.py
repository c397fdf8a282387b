"""How long the chunks of an upload are, on a line that loses them and behind a proxy, and where the next one begins."""

import math
import os
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.client.doubles.double import Handler, problem, stream
from umbel.aggregation.types import AssignmentId
from umbel.aggregation.update.wire import CHUNK_BYTES_MIN, least_chunk_bytes
from umbel.client.state.identity import Identity
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.timing import CHUNK_BYTES_MAX, Bandwidth, within
from umbel.client.wire.transport import Patience, Transport, connect
from umbel.client.wire.upload import Upload

UPDATE_BYTES = 400 << 20
N_TRIES = 40  # enough to halve the longest chunk until it is the shortest
FAST, SLOW = Bandwidth(up=1e9), Bandwidth(up=1.0)
WINDOW_S = 60.0


@contextmanager
def upload_of(path: Path, link: Bandwidth, handle: Handler) -> Generator[Upload]:
    """An upload of the update in `path`, to a coordinator that answers so."""
    with path.open("rb") as file, connect("https://coordinator.test", httpx.MockTransport(handle)) as replicas:
        coordinator = CoordinatorClient(Transport(replicas, Identity("d", Ed25519PrivateKey.generate()).authorize))
        assignment, total = AssignmentId("demo.1.1.d"), path.stat().st_size
        yield Upload(coordinator, assignment, file, total, "0" * 64, link, WINDOW_S)


def lengths_sent(path: Path, answer: Callable[[int], httpx.Response]) -> list[int]:
    """The lengths of the chunks of an update of 400 MiB, each answered so, for as long as patience lasts."""

    class Enough(Exception):
        pass

    def wait(_: float) -> None:
        if len(lengths) >= N_TRIES:
            raise Enough

    lengths: list[int] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "HEAD":
            return stream(404, b"")
        lengths.append(len(request.read()))
        return answer(lengths[-1])

    path.touch()
    os.truncate(path, UPDATE_BYTES)
    with upload_of(path, FAST, handle) as upload, pytest.raises(Enough):
        upload.send(Patience(within(1.0), math.inf, wait), resume=False)
    return lengths


def test_chunks_that_are_lost_become_shorter_but_never_too_short(tmp_path: Path) -> None:
    lengths = lengths_sent(tmp_path / "update", lambda _: stream(503, b""))
    assert lengths[0] == CHUNK_BYTES_MAX
    assert min(lengths) == lengths[-1] == least_chunk_bytes(UPDATE_BYTES) > CHUNK_BYTES_MIN


def test_a_proxy_that_takes_shorter_chunks_than_the_protocol_asks_for_gets_them(tmp_path: Path) -> None:
    lengths = lengths_sent(tmp_path / "update", lambda n_bytes: stream(413 if n_bytes > 100_000 else 503, b""))
    assert lengths[-1] == CHUNK_BYTES_MIN


def test_an_upload_goes_on_from_where_the_coordinator_says_that_it_stands(tmp_path: Path) -> None:
    """As after its disk lost what it had not yet written out."""
    update, received, log = random.Random(0).randbytes(3 * CHUNK_BYTES_MIN), bytearray(), list[str]()

    def handle(request: httpx.Request) -> httpx.Response:
        log.append(request.method)
        if log == ["POST", "PATCH"]:
            del received[-1000:]
        if request.method == "PATCH" and int(request.headers["upload-offset"]) != len(received):
            return problem(409, "mismatching-upload-offset")
        received.extend(request.read())
        complete = "?1" if len(received) == len(update) else "?0"
        fields = {"Upload-Offset": str(len(received)), "Upload-Complete": complete, "Upload-Length": str(len(update))}
        return stream(200 if request.method == "HEAD" else 201, b"", fields)

    (tmp_path / "update").write_bytes(update)
    with upload_of(tmp_path / "update", SLOW, handle) as upload:
        upload.send(Patience(within(1.0), math.inf, lambda _: None), resume=False)
    assert received == update
    assert log[:4] == ["POST", "PATCH", "HEAD", "PATCH"]
    assert log.count("POST") == 1
