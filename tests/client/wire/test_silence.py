"""When a coordinator counts as silent, and what requests raise then."""

import math
import socket
import threading
from collections.abc import Callable

import httpx
import pytest

from tests.client.doubles.double import stream
from umbel.client.errors import ClientError, CoordinatorBusy, CoordinatorGone, CoordinatorUnreachable
from umbel.client.wire.addresses import CoordinatorAddresses
from umbel.client.wire.silence import Silence
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


@pytest.mark.parametrize("status", [200, 404, 429])
def test_any_answer_ends_a_silence(status: int) -> None:
    silence = Silence(0.2)
    assert asked(silence, dead) is CoordinatorUnreachable
    asked(silence, lambda _request: stream(status, b""))
    threading.Event().wait(0.5)
    assert not silence.is_too_long


@pytest.mark.parametrize("status", [500, 502, 503])
def test_the_answer_of_a_proxy_alone_does_not(status: int) -> None:
    ended = threading.Event()
    silence = Silence(0.05, ended.set)
    assert asked(silence, lambda _request: stream(status, b"")) is CoordinatorBusy
    assert ended.wait(LIMIT_S)


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
    silence = Silence(0.3, ended.set)
    silence.failed()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"http://127.0.0.1:{mute.getsockname()[1]}"
        with connect(address) as there, pytest.raises(CoordinatorUnreachable):
            Transport(there, lambda _target, _body: {}, silence).ask("GET", "/", hold_s=LIMIT_S * 60)
    assert ended.wait(LIMIT_S)


@pytest.mark.parametrize("max_s", [0.0, -1.0, math.nan])
def test_a_time_that_is_none_is_refused(max_s: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        Silence(max_s)
