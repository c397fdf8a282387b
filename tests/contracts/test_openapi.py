"""Whatever is asked of any operation in /v1/openapi.json, the answer is one that the document declares, and never 5xx.

schemathesis makes the requests from the document and judges the answers by it. Half of what it makes up is put in place
of by what exists (`busy_house.py`), and requests are signed as they should be, or nearly.
"""

import base64
import time
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest
import requests
import schemathesis
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.contracts.busy_house import BusyHouse, busy_house
from tests.federations.server_device import Device, houses_over, problem, run_file
from tests.servers.postgres import Cluster
from umbel.aggregation.types import SLUG
from umbel.server.serve.app import create_app
from umbel.server.settings import Settings

Operation: TypeAlias = APIOperation[Any, Any, Any, Any]
Houses: TypeAlias = Callable[[], BusyHouse]

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
UNHURRIED = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)
NEW_KEY = Ed25519PrivateKey.generate()
ODD_HEADERS = [
    (b"Host", b"["),
    (b"Host", b"a:b:c"),
    (b"Host", b"umbel:99999999999"),
    (b"Host", "\u00e4/?#@".encode("latin-1")),
    (b"Content-Length", b"1"),
    (b"Content-Length", b"-1"),
    (b"Content-Length", b"9" * 400),
    (b"Content-Type", b"\xff\xfe; charset=nowhere"),
    (b"Transfer-Encoding", b"chunked"),
    (b"Authorization", b"Bearer \xff"),
    (b"Range", b"bytes=0-9,20-29"),
    (b"Range", b"bytes=" + b"9" * 15 + b"-"),
    (b"If-None-Match", b"*"),
    (b"If-Range", b"\xff"),
    (b"Cookie", b"a=\xff; b"),
    (b"X-Forwarded-For", b"\x00" * 100),
    (b"Expect", b"100-continue"),
    (b"Signature-Input", b"umbel=()"),
]


def _toml(text: str) -> bytes:
    return text.encode()


schemathesis.openapi.media_type(
    "application/toml",
    st.sampled_from([run_file(), run_file().replace("demo", "spare"), run_file() + "[stop]\nmetric = 'a'\n"]).map(_toml)
    | st.text(alphabet="[]{}=.,'\"#\n0123456789abcnift-\u00e4\0").map(_toml),
)
schemathesis.openapi.media_type("application/partial-upload", st.binary(max_size=300))
# Loaded once the application's media types are known.
SCHEMA = schemathesis.openapi.from_dict(create_app(Settings(data=Path("never-made"))).openapi())
OPERATIONS: dict[str, Operation] = {
    f"{found.ok().method} {found.ok().path}": found.ok()
    for found in SCHEMA.get_all_operations()
    if isinstance(found, Ok)
}


@pytest.fixture(
    scope="module", params=["sqlite", pytest.param("postgresql", marks=[pytest.mark.nightly, pytest.mark.postgresql])]
)
def houses(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Houses]:
    """A busy house; another one when the first is spent."""
    stack, current = ExitStack(), list[BusyHouse]()
    database_of: Callable[[Path], str | None] = lambda _: None  # noqa: E731 - one of two
    if request.param == "postgresql":
        cluster: Cluster = request.getfixturevalue("postgresql")
        database_of = lambda _: cluster.new_database()  # noqa: E731

    def ready() -> BusyHouse:
        if not current or current[-1].is_spent:
            stack.close()
            current.append(stack.enter_context(busy_house(tmp_path_factory.mktemp("house"))))
        return current[-1]

    with houses_over(database_of), stack:
        yield ready


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_answer_is_declared(name: str, houses: Houses) -> None:
    operation, there = OPERATIONS[name], houses()

    @settings(max_examples=max(10, settings().max_examples // 5), suppress_health_check=UNHURRIED)
    @given(st.data())
    def ask(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy(data.draw(st.sampled_from(_modes(operation)))))
        _put_in_what_exists(case, there, data)
        request = _request(case, data)
        _sign(request, case, there, data)
        answer = there.send(request)
        case.validate_response(answer, checks=CHECKS)
        if answer.status_code >= 400 and request.method != "HEAD":
            problem(answer)

    ask()


@pytest.mark.parametrize("path", sorted({operation.path for operation in OPERATIONS.values()}))
def test_a_method_that_is_not_declared_is_refused(path: str, houses: Houses) -> None:
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW"):
        if f"{method.lower()} {path}" not in OPERATIONS:
            answer = houses().send(httpx.Request(method, "http://umbel" + path))
            assert problem(answer) == "method-not-allowed"
            assert answer.headers["Allow"]


@pytest.mark.parametrize("header", ODD_HEADERS, ids=lambda header: repr(header)[:40])
def test_an_odd_header_field_is_nobodys_error(header: tuple[bytes, bytes], houses: Houses) -> None:
    for path in ("/v1/health", "/v1/check-ins", "/v1/admin/runs/demo", "/", "/%00", "/%ff%00", "//a/..", "/v1/" * 999):
        answer = houses().send(httpx.Request("GET", "http://umbel" + path, headers=[header]))
        assert answer.status_code < 500
        if answer.status_code >= 400:
            problem(answer)


@pytest.mark.parametrize("name", ["versions", "progress", "audit"])
def test_a_page_after_any_number_is_given_or_refused(name: str, houses: Houses) -> None:
    there = houses()
    for after in ((1 << 31) - 1, 1 << 31, 1 << 53, 1 << 63, 1 << 64):
        url = f"http://umbel/v1/admin/runs/ended/{name}?after={after}"
        answer = there.send(httpx.Request("GET", url, headers=there.it.admin))
        assert answer.status_code == 200 or problem(answer) == "malformed-request"


def _modes(operation: Operation) -> list[GenerationMode]:
    """What is wrong on purpose needs something that can be: any text is a path."""
    can_be_wrong = operation.body or operation.query or operation.headers
    return [GenerationMode.POSITIVE, GenerationMode.NEGATIVE] if can_be_wrong else [GenerationMode.POSITIVE]


def _put_in_what_exists(case: Case[Operation], there: BusyHouse, data: st.DataObject) -> None:
    known = there.values()
    parts: list[MutableMapping[str, Any]] = [case.path_parameters, case.query, case.headers]
    if isinstance(case.body, dict):
        case.body = message = _message(case.path, dict(case.body), there, data)
        parts.append(message)
    for values in parts:
        for name in known.keys() & values.keys():
            if name == "wait_s" or data.draw(st.integers(0, 3)):
                values[name] = data.draw(st.sampled_from(known[name]))
    if isinstance(case.body, bytes) and data.draw(st.integers(0, 3)):
        case.body = data.draw(st.sampled_from(there.bodies()))


def _message(path: str, made: dict[str, Any], there: BusyHouse, data: st.DataObject) -> dict[str, Any]:
    """What schemathesis made or, oftener, a message that would be taken, with at most one field as it was made."""
    real = there.messages().get(path.rpartition("/")[2], {})
    if "public_key" in real:
        real["token"] = there.unused_token()
        real["public_key"] = base64.b64encode(NEW_KEY.public_key().public_bytes_raw()).decode()
    if path == "/v1/check-ins":
        made.setdefault("wait_s", 0.0)
    if not real or data.draw(st.integers(0, 3)) == 0:
        return made
    kept = data.draw(st.sampled_from(["", *made]))
    return {**real, **({kept: made[kept]} if kept else {})}


def _request(case: Case[Operation], data: st.DataObject) -> httpx.Request:
    made = requests.Request(**case.as_transport_kwargs(base_url="http://umbel")).prepare()
    body = made.body.encode() if isinstance(made.body, str) else made.body or b""
    assert isinstance(body, bytes)
    headers = [(name.encode(), value.encode("latin-1")) for name, value in _text(made.headers)]
    if data.draw(st.integers(0, 4)) == 0:
        headers.append(data.draw(st.sampled_from(ODD_HEADERS)))
    assert made.method is not None
    assert made.url is not None
    return httpx.Request(made.method, made.url, content=body, headers=headers)


def _text(headers: Mapping[str, str | bytes]) -> Iterator[tuple[str, str]]:
    for name, value in headers.items():
        yield name, value if isinstance(value, str) else value.decode("latin-1")


def _sign(request: httpx.Request, case: Case[Operation], there: BusyHouse, data: st.DataObject) -> None:
    """As the operation asks or, one time in four, in some way that it does not."""
    wrong = data.draw(st.sampled_from(["", "", "", "", "", "", "none", "another's", "old", "of another body"]))
    if wrong == "none":
        return
    if case.path.startswith("/v1/admin"):
        request.headers.update({"Authorization": "Bearer " + "x" * 43} if wrong else there.it.admin)
        return
    signer = _signer(case, there)
    if wrong == "another's":
        signer = Device(signer.http, signer.name)
    body = b"another" if wrong == "of another body" else request.content
    created = int(time.time()) - (400 if wrong == "old" else 0)
    signed = signer.headers(request.method, request.url.raw_path.decode("ascii"), body, created)
    request.headers.update({name: signed[name] for name in ("Content-Digest", "Signature-Input", "Signature")})


def _signer(case: Case[Operation], there: BusyHouse) -> Device:
    """Who would send this: the holder of the assignment, or the newcomer."""
    if case.path == "/v1/enrolments":
        client = case.body.get("client") if isinstance(case.body, dict) else None
        is_name = isinstance(client, str) and SLUG.fullmatch(client)
        return Device(there.it.http, str(client) if is_name else "newcomer", key=NEW_KEY)
    holders = [
        one.device for one in [*there.held, *there.masked] if one.assignment == case.path_parameters.get("assignment")
    ]
    return (holders or [there.held[0].device])[0]
