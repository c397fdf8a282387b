"""Download a model, or a change of one: streamed to disk, resumed after a cut, and checked by its SHA-256.

The coordinator may answer with a link to another address. If the link brings nothing, or another file, the client asks
the coordinator for the file itself, and for `REST_S` for all other files too. After a cut it asks for a new link,
because the old one may have expired.
"""

import logging
import math
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx

from umbel.aggregation.plans.assignment import ModelChange, ModelRef
from umbel.client.errors import CoordinatorMisbehaved, LinkFailed, Redirected
from umbel.client.files import file_sha256
from umbel.client.wire.coordinator import CoordinatorClient
from umbel.client.wire.destinations import LinkRules, guarded
from umbel.client.wire.http_deadline import bound, exchange_until, timing
from umbel.client.wire.no_answer import why_no_answer
from umbel.client.wire.timing import Timing
from umbel.client.wire.transport import Patience, patiently

WantedFile = ModelRef | ModelChange
_LINK_CHARS_MAX = 8192
REST_S = 600.0
"""How long no link is followed after one that brought nothing; the coordinator must send files itself."""
_PAUSE_OVER_ANSWER = 1.5  # a busy machine may notice a deadline late, but must not miss the pause
log = logging.getLogger("umbel.client")


class Links:
    """Follows links for one client, by its site's rules.

    A link's address is not trusted. It gets no signature, no cookie and no name, and its answer counts only if the hash
    is right. The client follows one link, never from TLS to plain HTTP, and never to places that the site's policy
    excludes (`destinations.py`).

    A coordinator may send a link just to learn what is at an address. So all links that bring nothing look the same to
    it, in words and in time: the next request comes a whole number of `pause_s` after the link was followed, and
    everything up to the head of the answer takes less than one pause. A coordinator can still learn that a host
    announced a body of the right length, if that body then took longer than a pause, or broke off.
    """

    def __init__(self, rules: LinkRules | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: replaced in tests."""
        self._rules = rules or LinkRules()
        self.clock = clock
        self._rests_until = -math.inf

    @property
    def may_follow(self) -> bool:
        """Whether a link may be followed now. If not, the client asks the coordinator for the file itself."""
        return not self._rules.allow_none and self.clock() >= self._rests_until

    @staticmethod
    def pause_s(timing: Timing) -> float:
        """The unit of the time after which the coordinator learns that a link failed."""
        return _PAUSE_OVER_ANSWER * timing.stall_s

    def rest(self) -> None:
        """Follow no link for a while, after one that failed."""
        self._rests_until = self.clock() + REST_S

    def wait_out(self, since: float, timing: Timing, wait: Callable[[float], None]) -> None:
        """Wait until a whole number of pauses has passed since a link was followed."""
        gone_s, pause_s = self.clock() - since, self.pause_s(timing)
        wait(max(1, math.ceil(gone_s / pause_s)) * pause_s - gone_s)

    @contextmanager
    def open(self, redirected: Redirected, first_byte: int, size_bytes: int, until: float) -> Generator[httpx.Response]:
        """The file as a stream, from `first_byte` on if the answer's status is 206, else from the start.

        `size_bytes`: of the whole file; `until`: when it must be complete, on `time.monotonic`'s clock. Raises
        `LinkFailed` for any failure.
        """
        url = self._link_in(redirected)
        try:
            with ExitStack() as stack, exchange_until(until):
                response = self._asked(url, first_byte, stack)
                _require_file(response, first_byte, size_bytes)
                yield response
        except (httpx.TransportError, httpx.InvalidURL) as error:
            reason = why_no_answer(error, url.host)
            raise _failed(
                f"the coordinator's link leads to {url.host}, but no model came from there: {reason}"
            ) from error

    def _asked(self, url: httpx.URL, first_byte: int, stack: ExitStack) -> httpx.Response:
        """The head of the answer. Look-up, connection, TLS and request together have one time limit."""
        headers = {"Accept-Encoding": "identity"}
        if first_byte:
            headers["Range"] = f"bytes={first_byte}-"
        timeout = httpx.Timeout(timing().answer_s, connect=timing().stall_s)
        client = guarded(
            httpx.Client(follow_redirects=False, timeout=timeout), lambda address: self._rules.refusal(url, address)
        )
        http = stack.enter_context(bound(client))
        with exchange_until(time.monotonic() + timing().stall_s):
            return stack.enter_context(http.stream("GET", url, headers=headers))

    def _link_in(self, redirected: Redirected) -> httpx.URL:
        """The checked address. Messages name only its host, because anyone with the whole link can read the model."""
        text = redirected.location
        try:
            url = httpx.URL(text[: _LINK_CHARS_MAX + 1])
            _ = url.raw_host  # raises for some names that cannot be written in ASCII
        except (httpx.InvalidURL, ValueError) as error:
            raise _failed("the coordinator sent a malformed download link") from error
        if len(text) > _LINK_CHARS_MAX or url.scheme not in ("http", "https") or not url.host or url.userinfo:
            raise _failed("the coordinator sent a malformed download link")
        if redirected.is_secure and url.scheme != "https":
            raise _failed(
                f"the coordinator's link leads to {url.host} over http://, which others can read; the link is refused"
            )
        if (why := self._rules.refusal(url, url.host)) is not None:
            raise _failed(f"the coordinator's link leads to {url.host}, {why}; the link is refused")
        return url


def _require_file(response: httpx.Response, first_byte: int, size_bytes: int) -> None:
    """Raise `LinkFailed` unless the announced length is right. httpx then reads exactly that many bytes."""
    status, host = response.status_code, response.request.url.host
    if status not in (200, 206):
        raise _failed(f"the coordinator's link leads to {host}, which answered HTTP {status}")
    wanted = size_bytes - (first_byte if status == 206 else 0)
    if response.headers.get("content-length") != str(wanted) or "transfer-encoding" in response.headers:
        raise _failed(f"the coordinator's link leads to {host}, which did not announce a file of {wanted} bytes")


def _failed(what: str) -> LinkFailed:
    """Log what happened. The error itself does not say it."""
    log.warning("%s", what)
    return LinkFailed()


@dataclass(frozen=True, slots=True)
class Downloaded:
    """The missing bytes that came, and the seconds they took, without deliberate waits."""

    n_bytes: int
    seconds: float


def download(
    coordinator: CoordinatorClient, model: WantedFile, part: Path, patience: Patience, links: Links
) -> Downloaded:
    """Download the file to `part`, which may hold some of it already.

    Raises `CoordinatorMisbehaved` for a wrong digest, or too many bytes.
    """
    have, started = _size(part), links.clock()
    source = _DownloadSource(links, patience, is_direct=not links.may_follow)
    while True:
        patiently(lambda: _fetch_rest(coordinator, model, part, source), patience)
        if file_sha256(part) == model.sha256:
            return Downloaded(model.size_bytes - have, links.clock() - started - source.waited_s)
        part.unlink()
        if source.taken_at is None:
            raise CoordinatorMisbehaved(f"the downloaded model does not have the SHA-256 {model.sha256[:12]}…")
        log.warning(
            "the coordinator's download link led to a file with another SHA-256; downloading the model from the "
            "coordinator itself"
        )
        source.give_up()


@dataclass(slots=True)
class _DownloadSource:
    """Where to download from. `is_direct`: from the coordinator itself; `taken_at`: when the last link was followed."""

    links: Links
    patience: Patience
    is_direct: bool
    taken_at: float | None = None
    waited_s: float = 0.0

    def give_up(self) -> None:
        """Wait, then ask the coordinator itself from now on."""
        self.links.rest()
        self.wait_out()
        self.is_direct, self.taken_at = True, None

    def wait_out(self) -> None:
        """Wait until the coordinator may learn that a link has failed."""
        assert self.taken_at is not None, "only a failed link is waited out"
        began = self.links.clock()
        self.links.wait_out(self.taken_at, self.patience.timing, self.patience.wait)
        self.waited_s += self.links.clock() - began


def _fetch_rest(coordinator: CoordinatorClient, model: WantedFile, part: Path, source: _DownloadSource) -> None:
    """Append the missing bytes to `part`. After a cut they stay for the next try."""
    have = _size(part)
    if have > model.size_bytes:
        part.unlink()
        have = 0
    if have == model.size_bytes:
        return
    try:
        with coordinator.model(model.sha256, have, source.patience.until, source.is_direct) as response:
            _take(response, part, have, model.size_bytes)
    except Redirected as redirected:
        if source.is_direct:
            raise
        _follow(redirected, part, have, model.size_bytes, source)


def _follow(redirected: Redirected, part: Path, have: int, size_bytes: int, source: _DownloadSource) -> None:
    """Download the rest from a link. Raises `LinkFailed` at a time that reveals nothing to the coordinator."""
    source.taken_at = source.links.clock()
    try:
        with source.links.open(redirected, have, size_bytes, source.patience.until) as response:
            _take(response, part, have, size_bytes)
    except (LinkFailed, CoordinatorMisbehaved) as error:
        if _size(part) == have:
            source.give_up()
        else:
            source.wait_out()
        raise LinkFailed from error


def _take(response: httpx.Response, part: Path, have: int, size_bytes: int) -> None:
    """Append the body, or replace the file if the body is the whole file."""
    start = have if response.status_code == 206 else 0
    with part.open("r+b" if start else "wb") as file:
        file.seek(start)
        _copy(response, file, size_bytes - start)
    if _size(part) < size_bytes:
        raise CoordinatorMisbehaved(f"the downloaded model is shorter than {size_bytes} bytes")


def _copy(response: httpx.Response, file: BinaryIO, bytes_max: int) -> None:
    """Write every piece as it comes, so that a cut loses nothing in memory."""
    n_copied = 0
    for piece in response.iter_raw():
        n_copied += len(piece)
        if n_copied > bytes_max:
            raise CoordinatorMisbehaved("the downloaded model is longer than announced")
        file.write(piece)
        file.flush()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
