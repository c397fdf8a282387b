"""Where a coordinator sends a client for a model: an address that is not its own, and so is trusted with nothing.

It gets no signature, no cookie and no name: only which bytes are wanted. What it sends counts by its hash alone. Nobody
is followed from TLS to plain HTTP, nor any further than once, nor to places where a link has no business
(`destinations.py`). What went wrong is told to this machine's log; the coordinator is told, in the same words each
time, that the link did not work, so that it can find out nothing about the network that the client is in.
"""

import logging
from collections.abc import Generator
from contextlib import contextmanager

import httpx

from umbel.client.deadline import bound, exchange_until, timing
from umbel.client.destinations import guarded, kind_of
from umbel.client.errors import LinkFailed, Redirected

_LINK_CHARS_MAX = 8192
log = logging.getLogger("umbel.client")


@contextmanager
def elsewhere(redirected: Redirected, first_byte: int, size_bytes: int, until: float) -> Generator[httpx.Response]:
    """The file as a stream, from `first_byte` on if the answer's status is 206, else from the start.

    `size_bytes`: of the whole file; `until`: when it must be here, on `time.monotonic`'s clock. Raises `LinkFailed`,
    whatever it is that fails.
    """
    url = _link_in(redirected)
    headers = {"Accept-Encoding": "identity"}
    if first_byte:
        headers["Range"] = f"bytes={first_byte}-"
    timeout = httpx.Timeout(timing().answer_s, connect=timing().stall_s)
    try:
        with (
            bound(guarded(httpx.Client(follow_redirects=False, timeout=timeout), redirected.host)) as http,
            exchange_until(until),
            http.stream("GET", url, headers=headers) as response,
        ):
            _require_file(response, first_byte, size_bytes)
            yield response
    except (httpx.TransportError, httpx.InvalidURL) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:300]
        raise _failed(f"no model from {url.host}, where the coordinator keeps it: {reason}") from error


def _require_file(response: httpx.Response, first_byte: int, size_bytes: int) -> None:
    """Raise `LinkFailed` unless as many bytes are announced as are wanted. Then httpx takes no more and no fewer."""
    status, host = response.status_code, response.request.url.host
    if status not in (200, 206):
        raise _failed(f"{host}, where the coordinator keeps its models, answered {status}")
    wanted = size_bytes - (first_byte if status == 206 else 0)
    if response.headers.get("content-length") != str(wanted) or "transfer-encoding" in response.headers:
        raise _failed(f"{host}, where the coordinator keeps its models, did not announce a file of {wanted} bytes")


def _link_in(redirected: Redirected) -> httpx.URL:
    """The address, if it is one to go to. Messages name no more of it than the host: who has it can read the model."""
    text = redirected.location
    try:
        url = httpx.URL(text[: _LINK_CHARS_MAX + 1])
        _ = url.raw_host  # some names that cannot be written in ASCII are only found out here
    except (httpx.InvalidURL, ValueError) as error:
        raise _failed("the coordinator sent us to what is no address") from error
    if len(text) > _LINK_CHARS_MAX or url.scheme not in ("http", "https") or not url.host or url.userinfo:
        raise _failed("the coordinator sent us to what is no address")
    if redirected.is_secure and url.scheme != "https":
        raise _failed(f"the coordinator sent us to {url.host} over http://, which others can read, and we do not go")
    if (kind := kind_of(url.host)) not in (None, kind_of(redirected.host)):
        raise _failed(f"the coordinator sent us to {url.host}, {kind}, and we do not go")
    return url


def _failed(what: str) -> LinkFailed:
    """The error, which is all that others are told; what happened, for the log."""
    log.warning("%s", what)
    return LinkFailed()
