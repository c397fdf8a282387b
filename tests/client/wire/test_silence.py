"""When a coordinator counts as silent, and what requests raise then."""

import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.client.doubles.double import stream
from tests.client.doubles.double_server import served
from tests.client.doubles.dripping import dripping
from tests.servers.waits import wait_until
from umbel.client.errors import (
    ClientError,
    CoordinatorBusy,
    CoordinatorGone,
    CoordinatorUnreachable,
    NotACoordinator,
)
from umbel.client.wire.addresses import CoordinatorAddresses
from umbel.client.wire.http_deadline import timed_by
from umbel.client.wire.silence import Silence
from umbel.client.wire.timing import SLOWEST_BYTES_PER_S, Backoff, Timing
from umbel.client.wire.transport import Transport, connect

LIMIT_S = 60.0


def asked(silence: Silence, handle: Callable[[httpx.Request], httpx.Response]) -> type[ClientError] | None:
    """What a request raises."""
    with CoordinatorAddresses(["http://umbel.test"], httpx.MockTransport(handle)) as addresses:
        try:
            Transport(addresses, lambda _target, _body: {}, silence).ask("GET", "/")
        except ClientError as error:
            return type(error)
    return None


@pytest.fixture
def silence() -> Generator[Silence]:
    """One that is not too long before the test ends."""
    silence = Silence(LIMIT_S)
    yield silence
    silence.answered()


def dead(_request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("nobody listens")


def test_a_silence_ends_once_and_every_request_after_it_is_refused() -> None:
    ended, n = threading.Event(), list[int]()

    def gives_up() -> None:
        n.append(1)
        ended.set()

    silence = Silence(0.05, gives_up)
    assert asked(silence, dead) is CoordinatorUnreachable
    assert ended.wait(LIMIT_S)
    assert asked(silence, dead) is CoordinatorGone
    assert asked(silence, lambda _request: stream(200, b"")) is CoordinatorGone
    assert n == [1]


@pytest.mark.parametrize("status", [200, 404])
def test_an_answer_ends_a_silence_and_so_does_a_refusal(silence: Silence, status: int) -> None:
    assert asked(silence, dead) is CoordinatorUnreachable
    assert silence.ends_at < math.inf
    asked(silence, lambda _request: stream(status, b""))
    assert silence.ends_at == math.inf


PAGE = {"Content-Type": "text/html; charset=utf-8"}


@pytest.mark.parametrize(
    ("status", "headers", "kind"),
    [
        *((status, {}, CoordinatorBusy) for status in (408, 425, 429, 500, 502, 503, 504, 511, 522)),
        *((status, PAGE, CoordinatorBusy) for status in (429, 503)),
        (200, PAGE, NotACoordinator),
        (200, {"Content-Type": "Text/Plain"}, NotACoordinator),
        (200, {"Content-Type": "application/xhtml+xml"}, NotACoordinator),
    ],
)
def test_what_is_asked_for_again_is_no_usable_answer(
    silence: Silence, status: int, headers: dict[str, str], kind: type[ClientError]
) -> None:
    assert asked(silence, lambda _request: stream(status, b"<html>", headers)) is kind
    ends_at = silence.ends_at
    assert ends_at < math.inf
    assert asked(silence, lambda _request: stream(status, b"<html>", headers)) is kind
    assert silence.ends_at == ends_at, "it goes on"


def test_the_error_of_a_silence_that_was_too_long_has_the_cause_of_the_last_request() -> None:
    ended = threading.Event()
    silence = Silence(0.05, ended.set)
    assert asked(silence, lambda _request: stream(429, b"<html>", PAGE)) is CoordinatorBusy
    assert ended.wait(LIMIT_S)
    words = r"no usable answer for 0\.05 s.*The last request failed: .*HTTP 429.*Start the client again"
    with CoordinatorAddresses(["http://umbel.test"]) as addresses, pytest.raises(CoordinatorGone, match=words):
        Transport(addresses, lambda _target, _body: {}, silence).ask("GET", "/")


def test_by_default_a_silence_is_never_too_long() -> None:
    silence = Silence()
    assert asked(silence, dead) is CoordinatorUnreachable
    assert not any(isinstance(one, threading.Timer) for one in threading.enumerate())


def test_a_time_longer_than_any_timer_is_no_limit() -> None:
    silence = Silence(1e10)
    assert asked(silence, dead) is CoordinatorUnreachable
    assert silence.ends_at == math.inf


def test_a_request_to_a_coordinator_that_says_nothing_ends_with_the_silence() -> None:
    ended = threading.Event()
    silence = Silence(0.5, ended.set)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"http://127.0.0.1:{mute.getsockname()[1]}"
        with connect(address) as there:
            transport = Transport(there, lambda _target, _body: {}, silence)
            silence.failed("no answer")  # after `connect`, which takes a while on a busy machine
            with pytest.raises(CoordinatorUnreachable):
                transport.ask("GET", "/", hold_s=LIMIT_S * 60)
    assert ended.wait(LIMIT_S)


@pytest.mark.parametrize("max_s", [0.0, -1.0, math.nan])
def test_a_time_that_is_none_is_refused(max_s: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        Silence(max_s)


# --- bodies that take long ---


class Body(httpx.SyncByteStream):
    """`pause_s`: before each piece."""

    def __init__(self, pieces: Iterable[bytes], pause_s: float = 0.0) -> None:
        self._pieces, self._pause_s, self.is_closed = pieces, pause_s, False

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            threading.Event().wait(self._pause_s)
            yield piece

    def close(self) -> None:
        self.is_closed = True


@contextmanager
def answering(body: Body, silence: Silence) -> Generator[httpx.Response]:
    """An answer with this body, which the caller reads."""
    handle = httpx.MockTransport(lambda _request: httpx.Response(200, stream=body))
    with (
        CoordinatorAddresses(["http://umbel.test"], handle) as addresses,
        Transport(addresses, lambda _target, _body: {}, silence).stream("GET", "/") as response,
    ):
        yield response


@contextmanager
def downloading(url: str, silence: Silence) -> Generator[httpx.Response]:
    """The answer to a request whose body the caller reads."""
    with connect(url) as there:
        transport = Transport(there, lambda _target, _body: {}, silence)
        with transport.stream("GET", "/v1/models/0", until=time.monotonic() + LIMIT_S) as response:
            yield response


def test_the_head_of_an_answer_ends_no_silence_and_the_whole_body_does(silence: Silence) -> None:
    silence.failed("no answer")
    with served(lambda _request: stream(200, bytes(1000))) as url, downloading(url, silence) as response:
        assert silence.ends_at < math.inf
        assert len(b"".join(response.iter_raw())) == 1000
    assert silence.ends_at == math.inf


def test_a_silence_ends_the_client_though_a_byte_of_an_answer_comes_now_and_then() -> None:
    silence = Silence(0.3)

    def download(url: str) -> None:
        with downloading(url, silence) as response:
            silence.failed("no answer to another request")
            for _ in response.iter_raw():
                pass

    with dripping(b" ") as url, pytest.raises(CoordinatorUnreachable):
        download(url)
    wait_until("the end of the silence", lambda: silence.is_too_long)


def test_a_silence_begins_when_an_answer_comes_too_slowly(silence: Silence) -> None:
    quick = Timing(answer_s=0.05, stall_s=3.0, backoff=Backoff())
    with timed_by(quick), answering(Body(itertools.repeat(b" "), pause_s=0.02), silence) as response:
        pieces = response.iter_raw()
        wait_until("a byte that comes too late", lambda: next(pieces) and silence.cause)
        assert silence.cause == "its answer comes too slowly, at less than 1200 bytes a second"


def test_a_model_that_arrives_keeps_deferring_the_end_of_a_silence(silence: Silence) -> None:
    silence.failed("no answer")
    silence.ends_at -= LIMIT_S - 5  # soon, if nothing came
    with dripping(bytes(100_000)) as url, downloading(url, silence) as response:
        body = response.iter_raw()
        wait_until("a whole minute to go on", lambda: next(body) and silence.ends_at > time.monotonic() + LIMIT_S / 2)
        assert silence.cause == "no answer", "it goes on until the body is whole"


def test_bytes_defer_the_end_by_their_time_at_the_slowest_rate_and_never_beyond_the_limit(silence: Silence) -> None:
    silence.received(10**9)
    assert silence.ends_at == math.inf, "there is no silence"
    silence.failed("no answer")
    began = silence.ends_at
    for n_bytes in (1, 1, 1):
        silence.received(n_bytes)
    assert began < silence.ends_at <= began + 3 / SLOWEST_BYTES_PER_S + 1e-9
    silence.received(10**9)
    assert began < silence.ends_at <= time.monotonic() + LIMIT_S


def test_a_deferred_silence_ends_at_its_new_end() -> None:
    ended = threading.Event()
    silence = Silence(0.8, ended.set)
    silence.failed("no answer")
    first_end = silence.ends_at
    threading.Event().wait(0.1)
    silence.received(10**6)
    assert ended.wait(LIMIT_S)
    assert time.monotonic() >= silence.ends_at > first_end


def test_an_answer_ends_the_timer_of_a_silence() -> None:
    silence = Silence(24 * 3600.0)
    silence.failed("no answer")
    silence.answered()
    wait_until("no timer", lambda: not any(isinstance(one, threading.Timer) for one in threading.enumerate()))


def test_a_body_that_is_left_early_is_closed(silence: Silence) -> None:
    body = Body([b"one", b"two"])
    with answering(body, silence) as response:
        assert next(response.iter_raw()) == b"one"
    assert body.is_closed
