"""The load generator against a real socket: every script ends, pauses are kept, wrong answers are named."""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from umbel.sim.bench.coordinator.http_load import Load, Script, SimDevice, Until, once
from umbel.sim.bench.report import BenchFailed


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200 if body != b"no" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def echoing() -> Generator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def request(body: bytes) -> bytes:
    return SimDevice("device-1").request("POST", "/", body)


def test_more_scripts_than_connections_all_end() -> None:
    with echoing() as url, Load(url, 3) as load:
        tally = load.run(once(request(b"x" * i)) for i in range(20))
    assert len(tally.latencies_s) == 20
    assert tally.statuses == {200: 20}
    assert 0 < tally.quantile_ms(0.5) <= tally.quantile_ms(1.0)


def test_a_script_sees_its_answers_and_pauses() -> None:
    seen: list[bytes] = []

    def script() -> Script:
        answer = yield request(b"one")
        seen.append(answer.body)
        due_at = time.perf_counter() + 0.1
        yield Until(due_at)
        assert time.perf_counter() >= due_at
        answer = yield request(b"two")
        seen.append(answer.body)

    with echoing() as url, Load(url, 1) as load:
        load.run([script()])
    assert seen == [b"one", b"two"]


def test_an_answer_that_should_not_be_is_named() -> None:
    with echoing() as url, Load(url, 1) as load:
        tally = load.run([once(request(b"yes")), once(request(b"no"))])
    with pytest.raises(BenchFailed, match="404"):
        tally.require_all(200)
