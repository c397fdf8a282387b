"""How long the chunks of an upload are on a line that loses them, and behind a proxy that takes only short ones."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.client.double import stream
from umbel.aggregation.types import AssignmentId
from umbel.aggregation.wire import CHUNK_BYTES_MIN, least_chunk_bytes
from umbel.client.coordinator import Coordinator
from umbel.client.identity import Identity
from umbel.client.link import CHUNK_BYTES_MAX, Link
from umbel.client.send import Upload
from umbel.client.timing import within
from umbel.client.transport import Patience, Transport, connect

UPDATE_BYTES = 400 << 20
N_TRIES = 40  # enough to halve the longest chunk until it is the shortest
FAST = Link(up=1e9)


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

    with path.open("w+b") as file:
        file.truncate(UPDATE_BYTES)
        with connect("https://coordinator.test", httpx.MockTransport(handle)) as replicas:
            coordinator = Coordinator(Transport(replicas, Identity("d", Ed25519PrivateKey.generate()).authorize))
            upload = Upload(coordinator, AssignmentId("demo.1.1.d"), file, UPDATE_BYTES, "0" * 64, FAST, 60.0)
            with pytest.raises(Enough):
                upload.send(Patience(within(1.0), None, wait), resume=False)
    return lengths


def test_chunks_that_are_lost_become_shorter_but_never_too_short(tmp_path: Path) -> None:
    lengths = lengths_sent(tmp_path / "update", lambda _: stream(503, b""))
    assert lengths[0] == CHUNK_BYTES_MAX
    assert min(lengths) == lengths[-1] == least_chunk_bytes(UPDATE_BYTES) > CHUNK_BYTES_MIN


def test_a_proxy_that_takes_shorter_chunks_than_the_protocol_asks_for_gets_them(tmp_path: Path) -> None:
    lengths = lengths_sent(tmp_path / "update", lambda n_bytes: stream(413 if n_bytes > 100_000 else 503, b""))
    assert lengths[-1] == CHUNK_BYTES_MIN
