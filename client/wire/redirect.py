"""Where a coordinator sends a client for a model: an address that is not its own, and so is trusted with nothing.

It gets no signature, no cookie and no name: only which bytes are wanted. What it sends counts by its hash alone. Nobody
is followed from TLS to plain HTTP, nor any further than once, nor to places that the site's policy keeps links from
(`destinations.py`).

A coordinator may send a client to an address just to find out what is there. So it hears the same of every link that
brought nothing, and at the same time. The next request to the coordinator comes a whole number of `Links.pause_s` after
the link was taken, and everything up to the head of the answer takes less than one. After that no link is followed for
`REST_S`. What went wrong is told to this machine's log alone.

What a coordinator can still tell: that a link brought the right file; and that a host answered with a body of just the
announced length, if it then took longer than a pause over it, or broke off.
"""

import logging
import math
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager

import httpx

from umbel.client.errors import LinkFailed, Redirected
from umbel.client.wire.destinations import LinkRules, guarded
from umbel.client.wire.http_deadline import bound, exchange_until, timing
from umbel.client.wire.timing import Timing

_LINK_CHARS_MAX = 8192
REST_S = 600.0
"""How long no link is followed after one that brought nothing: so long the coordinator is asked for the file itself."""
_PAUSE_OVER_ANSWER = 1.5  # a busy machine notices a deadline late; that must not carry a failure into the next pause
log = logging.getLogger("umbel.client")


class Links:
    """Follows one client's links, by its site's rules. `clock`: that of `time.monotonic`, but in tests."""

    def __init__(self, rules: LinkRules | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rules = rules or LinkRules()
        self.clock = clock
        self._rests_until = -math.inf

    @property
    def may_follow(self) -> bool:
        """Whether a link would be followed now. If not, the coordinator is asked for the file itself at once."""
        return not self._rules.allow_none and self.clock() >= self._rests_until

    @staticmethod
    def pause_s(timing: Timing) -> float:
        """After a whole number of these the coordinator hears that a link brought nothing."""
        return _PAUSE_OVER_ANSWER * timing.stall_s

    def rest(self) -> None:
        """A link has brought nothing: follow none for a while."""
        self._rests_until = self.clock() + REST_S

    def wait_out(self, since: float, timing: Timing, wait: Callable[[float], None]) -> None:
        """Wait until a whole number of pauses has gone since a link was taken."""
        gone_s, pause_s = self.clock() - since, self.pause_s(timing)
        wait(max(1, math.ceil(gone_s / pause_s)) * pause_s - gone_s)

    @contextmanager
    def open(self, redirected: Redirected, first_byte: int, size_bytes: int, until: float) -> Generator[httpx.Response]:
        """The file as a stream, from `first_byte` on if the answer's status is 206, else from the start.

        `size_bytes`: of the whole file; `until`: when it must be here, on `time.monotonic`'s clock. Raises
        `LinkFailed`, whatever it is that fails.
        """
        url = self._link_in(redirected)
        try:
            with ExitStack() as stack, exchange_until(until):
                response = self._asked(url, first_byte, stack)
                _require_file(response, first_byte, size_bytes)
                yield response
        except (httpx.TransportError, httpx.InvalidURL) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0][:300]
            raise _failed(f"no model from {url.host}, where the coordinator keeps it: {reason}") from error

    def _asked(self, url: httpx.URL, first_byte: int, stack: ExitStack) -> httpx.Response:
        """The head of the answer, within the time for it: look-up, connection, TLS and all."""
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
        """The address, if it is one to go to. Messages name no more of it than the host: who has it can read the
        model.
        """
        text = redirected.location
        try:
            url = httpx.URL(text[: _LINK_CHARS_MAX + 1])
            _ = url.raw_host  # some names that cannot be written in ASCII are only found out here
        except (httpx.InvalidURL, ValueError) as error:
            raise _failed("the coordinator sent us to what is no address") from error
        if len(text) > _LINK_CHARS_MAX or url.scheme not in ("http", "https") or not url.host or url.userinfo:
            raise _failed("the coordinator sent us to what is no address")
        if redirected.is_secure and url.scheme != "https":
            raise _failed(
                f"the coordinator sent us to {url.host} over http://, which others can read, and we do not go"
            )
        if (why := self._rules.refusal(url, url.host)) is not None:
            raise _failed(f"the coordinator sent us to {url.host}, {why}, and we do not go")
        return url


def _require_file(response: httpx.Response, first_byte: int, size_bytes: int) -> None:
    """Raise `LinkFailed` unless as many bytes are announced as are wanted. Then httpx takes no more and no fewer."""
    status, host = response.status_code, response.request.url.host
    if status not in (200, 206):
        raise _failed(f"{host}, where the coordinator keeps its models, answered {status}")
    wanted = size_bytes - (first_byte if status == 206 else 0)
    if response.headers.get("content-length") != str(wanted) or "transfer-encoding" in response.headers:
        raise _failed(f"{host}, where the coordinator keeps its models, did not announce a file of {wanted} bytes")


def _failed(what: str) -> LinkFailed:
    """The error, which is all that others are told; what happened, for the log."""
    log.warning("%s", what)
    return LinkFailed()
