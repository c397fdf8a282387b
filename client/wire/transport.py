"""One HTTP exchange with a coordinator, and its repetition.

`_raise_for` decides which answers are final and which are tried again:

```
a certificate that is refused at first         CertificateRefused                                         final
connection refused, reset, cut, timed out      CoordinatorUnreachable   ┐
408, 425, 429, 5xx                             CoordinatorBusy          │
401 replayed-nonce (a proxy's own retry)       CoordinatorBusy          ├ TryAgain
a page (text/...) in place of an answer        NotACoordinator          │
3xx, once the coordinator has answered         NotACoordinator          ┘
none but these for too long (`silence.py`)     CoordinatorGone                                            final
any other 4xx, and 3xx                         CoordinatorRefused: AccessRefused, AssignmentClosed, ...   final
a body over its cap, or not what was asked     CoordinatorMisbehaved                                      final
```

Every try is signed anew, with a new nonce and time. The coordinator may be hostile: no answer is read past its cap, no
compressed answer is unpacked, no redirect is followed, and no exchange outlasts its deadline.
"""

import hashlib
import logging
import math
import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import BinaryIO, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.messages import Problem
from umbel.aggregation.plans.tensors import TensorRules
from umbel.aggregation.trust.signatures import Target
from umbel.client.errors import (
    CertificateRefused,
    ClientError,
    CoordinatorBusy,
    CoordinatorGone,
    CoordinatorMisbehaved,
    CoordinatorRefused,
    CoordinatorUnreachable,
    NotACoordinator,
    OutOfTime,
    Redirected,
    TryAgain,
    first_finding,
    printable,
    refusal_of,
)
from umbel.client.wire.addresses import ADDRESSES_MAX, CoordinatorAddresses, addresses_in
from umbel.client.wire.http_deadline import ended_by, exchange_until, timed_by, timing
from umbel.client.wire.no_answer import first_line, is_untrusted, why_no_answer
from umbel.client.wire.silence import Silence, TimedBody
from umbel.client.wire.timing import IDLE, RETRY_AFTER_MAX_S, Timing

_PIECE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class FileBody:
    """`n_bytes` of an open file from `first` on. For one thread at a time; the file must not change."""

    file: BinaryIO
    first: int
    n_bytes: int

    def __len__(self) -> int:
        return self.n_bytes

    def pieces(self) -> Iterator[bytes]:
        """The bytes in pieces. Raises `EOFError` for a file that became shorter."""
        self.file.seek(self.first)
        left = self.n_bytes
        while left:
            piece = self.file.read(min(_PIECE_BYTES, left))
            if not piece:
                raise EOFError("the file became shorter while it was sent")
            left -= len(piece)
            yield piece


Body = bytes | FileBody


def sha256_of(body: Body) -> bytes:
    """The body's SHA-256, 32 bytes."""
    if isinstance(body, bytes):
        return hashlib.sha256(body).digest()
    digest = hashlib.sha256()
    for piece in body.pieces():
        digest.update(piece)
    return digest.digest()


JSON_BYTES_MAX = 1 << 20
_BUSY = {408, 425, 429, *range(500, 600)}
_PROBLEM = TypeAdapter(Problem)
_PROBLEM_TYPE = "urn:umbel:problem:"

# Not the process-wide generator: training seeds it and draws from it.
_jitter = random.SystemRandom().random
T = TypeVar("T")
Authorize = Callable[[Target, bytes], Mapping[str, str]]
log = logging.getLogger("umbel.client")


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A successful answer, read whole."""

    headers: Mapping[str, str]
    body: bytes
    status: int

    def parse(self, adapter: TypeAdapter[T]) -> T:
        """The body as JSON of this type. Raises `CoordinatorMisbehaved`."""
        try:
            return adapter.validate_json(self.body)
        except (ValidationError, RecursionError) as error:
            raise CoordinatorMisbehaved(f"the coordinator's answer does not parse: {_brief(error)}") from error


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to keep trying. `until`: on `time.monotonic`'s clock; `wait`: sleeps between tries."""

    timing: Timing = IDLE
    until: float = math.inf
    wait: Callable[[float], None] = time.sleep


class Transport:
    """Exchanges with one coordinator. Threads may share it. `authorize` makes the headers that authenticate."""

    def __init__(self, replicas: CoordinatorAddresses, authorize: Authorize, silence: Silence | None = None) -> None:
        """`silence`: once it is too long, every request raises `CoordinatorGone`."""
        self._replicas = replicas
        self._authorize = authorize
        self._silence = silence or Silence()

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: str = "",
        body: Body = b"",
        headers: Mapping[str, str] | None = None,
        hold_s: float = 0.0,
        bytes_max: int = JSON_BYTES_MAX,
    ) -> HttpAnswer:
        """One try. `hold_s`: how much longer than usual the answer may take, for long polls; `bytes_max`: its cap."""
        large_bytes = len(body) + max(0, bytes_max - JSON_BYTES_MAX)
        until = time.monotonic() + timing().exchange_s(large_bytes) + hold_s
        with self.stream(method, path, query=query, body=body, headers=headers, hold_s=hold_s, until=until) as response:
            return HttpAnswer(response.headers, read_capped(response, bytes_max), response.status_code)

    @contextmanager
    def stream(
        self,
        method: str,
        path: str,
        *,
        query: str = "",
        body: Body = b"",
        headers: Mapping[str, str] | None = None,
        hold_s: float = 0.0,
        until: float = math.inf,
    ) -> Generator[httpx.Response]:
        """One try whose body the caller reads, with `iter_raw`. Raises as the module's table says.

        `until`: the end of the exchange, on `time.monotonic`'s clock.
        """
        signed = self._authorize(Target(method, path, query), sha256_of(body))
        url = f"{path}?{query}" if query else path
        timeout = httpx.Timeout(timing().answer_s + hold_s, connect=timing().stall_s)
        fields = {"Accept-Encoding": "identity", **(headers or {}), **signed}
        if isinstance(body, FileBody):
            fields["Content-Length"] = str(len(body))
        content = body if isinstance(body, bytes) else body.pieces()
        http = self._replicas.current
        self._require_not_gone()
        try:
            with exchange_until(until), ended_by(lambda: self._silence.ends_at), ExitStack() as exchange:
                sent = http.stream(method, url, content=content, headers=fields, timeout=timeout)
                response = exchange.enter_context(sent)
                _raise_for(response, self._replicas.has_answered)
                yield self._with_timed_body(response)
        except httpx.TransportError as error:
            unanswered = self._unanswered(http, error)
            self._silence.failed(str(unanswered))
            raise unanswered from error
        except (CoordinatorBusy, NotACoordinator) as error:
            self._silence.failed(str(error))
            error.has_other = error.is_down and self._replicas.note_failure(http)
            raise
        except CoordinatorRefused:
            self._silence.answered()
            raise
        else:
            self._replicas.note_answer()
            self._silence.answered()

    def _with_timed_body(self, response: httpx.Response) -> httpx.Response:
        assert isinstance(response.stream, httpx.SyncByteStream)
        response.stream = TimedBody(response.stream, self._silence, timing().exchange_s(0))
        return response

    def _require_not_gone(self) -> None:
        if self._silence.is_too_long:
            raise CoordinatorGone(self._silence.max_s, self._silence.cause)

    def _unanswered(self, http: httpx.Client, error: httpx.TransportError) -> ClientError:
        """The error to raise. A certificate that was never accepted is a wrong setting, which no retry mends."""
        has_other, host = self._replicas.note_failure(http), http.base_url.netloc.decode()
        text = f"no answer from the coordinator at {host}: {why_no_answer(error, host)}"
        if is_untrusted(error) and not has_other and not self._replicas.has_answered:
            return CertificateRefused(text)
        return CoordinatorUnreachable(text, has_other=has_other)

    def close(self) -> None:
        self._replicas.close()


def connect(server: str, transport: httpx.BaseTransport | None = None) -> CoordinatorAddresses:
    """Clients for a coordinator at `URL[,URL...]`. Raises `ValueError` unless each is `http(s)://host[:port]`."""
    return CoordinatorAddresses(addresses_in(server), transport)


def patiently(step: Callable[[], T], patience: Patience) -> T:
    """Repeat `step` while it raises `TryAgain`. Raises `OutOfTime` if the next try would come too late.

    It waits between tries, unless another address has not failed.
    """
    failures = n_others = 0
    while True:
        try:
            with timed_by(patience.timing):
                found = step()
        except TryAgain as error:
            if error.has_other and n_others < ADDRESSES_MAX:  # another thread's success must not prevent all waits
                if failures == n_others == 0:
                    log.info("%s; trying the coordinator's next address", error)
                n_others += 1
                continue
            failures, n_others = failures + 1, 0
            wait_s = patience.timing.backoff.wait_s(failures, _jitter(), error.retry_after_s)
            if time.monotonic() + wait_s > patience.until:
                raise OutOfTime(f"no success before the end of the round's window: {error}") from error
            if failures == 1 or failures % 10 == 0:
                log.warning("%s; trying again (try %d)", error, failures + 1)
            patience.wait(wait_s)
        else:
            if failures:
                log.info("the coordinator answers again, at try %d", failures + 1)
            return found


def at_any_address(step: Callable[[], T]) -> T:
    """Try `step` once at each address, until one answers; no waiting."""
    while True:
        try:
            return step()
        except TryAgain as error:
            if not error.has_other:
                raise


def read_capped(response: httpx.Response, bytes_max: int) -> bytes:
    """The body as sent, if it is at most `bytes_max` long; reads no further than that."""
    body = bytearray()
    for piece in response.iter_raw():
        if len(body) + len(piece) > bytes_max:
            raise CoordinatorMisbehaved(f"the coordinator's answer is longer than {bytes_max} bytes")
        body += piece
    return bytes(body)


def _page_in(response: httpx.Response, has_answered: bool) -> str | None:
    """What a proxy or a network's login page has sent in place of an answer; None if it may be the coordinator's.

    No coordinator sends text, and it redirects only to models, with 307. Another redirect is a wrong address, which no
    retry mends, unless the coordinator has answered there before.
    """
    media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    status = response.status_code
    is_text = media_type.startswith("text/") or media_type == "application/xhtml+xml"
    if response.is_success and is_text:
        return f"a {printable(media_type[:64])} page"
    if has_answered and 300 <= status < 400 and (status != 307 or is_text):
        place = printable(response.headers.get("location", "")[:200])
        return f"HTTP {status} to {place!r}"
    return None


def _raise_for(response: httpx.Response, has_answered: bool) -> None:
    """`has_answered`: whether the coordinator ever did."""
    if (page := _page_in(response, has_answered)) is not None:
        raise NotACoordinator(response.request.url.netloc.decode(), page)
    if response.is_success:
        return
    kind, detail, tensors = _problem(response)
    if response.status_code in _BUSY or kind == "replayed-nonce":
        is_down = response.status_code >= 500
        text = f"the coordinator cannot answer now ({kind}): {detail}"
        raise CoordinatorBusy(text, _retry_after_s(response), is_down)
    if response.status_code == 307:
        asked = response.request.url
        raise Redirected(kind, detail, 307, response.headers.get("location", ""), asked.scheme == "https", asked.host)
    refusal = refusal_of(kind, detail, response.status_code)
    refusal.tensors = tensors
    raise refusal


def _problem(response: httpx.Response) -> tuple[str, str, TensorRules | None]:
    """Kind and detail of an error answer, which a proxy may have sent, and the rules in it."""
    body = read_capped(response, JSON_BYTES_MAX)
    try:
        problem = _PROBLEM.validate_json(body)
    except (ValidationError, RecursionError):
        place = f" (redirects to {response.headers['location'][:200]!r})" if response.has_redirect_location else ""
        return (
            f"http-{response.status_code}",
            f"it answered HTTP {response.status_code}{place} without saying why",
            None,
        )
    return printable(problem.type.removeprefix(_PROBLEM_TYPE)[:64]), printable(problem.detail), problem.tensors


def _retry_after_s(response: httpx.Response) -> float:
    """Retry-After in seconds. Its date form, which umbel's coordinator does not send, counts as none."""
    text = response.headers.get("retry-after", "")
    return min(float(text), RETRY_AFTER_MAX_S) if text.isascii() and text.isdigit() else 0.0


def _brief(error: Exception) -> str:
    """An error's text in one line."""
    return first_finding(error, "body") if isinstance(error, ValidationError) else first_line(error)
