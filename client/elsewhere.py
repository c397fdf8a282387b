"""Where a coordinator sends a client for a model: an address that is not its own, and so is trusted with nothing.

It gets no signature, no cookie and no name: only which bytes are wanted. What it sends counts by its hash alone. Nobody
is followed from TLS to plain HTTP, nor any further than once.
"""

from collections.abc import Generator
from contextlib import contextmanager

import httpx

from umbel.client.deadline import bound, exchange_until, timing
from umbel.client.errors import LinkFailed, Redirected

_LINK_CHARS_MAX = 8192


@contextmanager
def elsewhere(redirected: Redirected, first_byte: int, until: float) -> Generator[httpx.Response]:
    """The file as a stream, from `first_byte` on if the answer's status is 206, else from the start.

    `until`: when it must be here, on `time.monotonic`'s clock. Raises `LinkFailed`, whatever it is that fails.
    """
    url = _link_in(redirected)
    headers = {"Accept-Encoding": "identity"}
    if first_byte:
        headers["Range"] = f"bytes={first_byte}-"
    timeout = httpx.Timeout(timing().answer_s, connect=timing().stall_s)
    try:
        with (
            bound(httpx.Client(follow_redirects=False, timeout=timeout)) as http,
            exchange_until(until),
            http.stream("GET", url, headers=headers) as response,
        ):
            if response.status_code not in (200, 206):
                raise LinkFailed(f"{url.host}, where the coordinator keeps its models, answered {response.status_code}")
            yield response
    except (httpx.TransportError, httpx.InvalidURL) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:300]
        raise LinkFailed(f"no model from {url.host}, where the coordinator keeps it: {reason}") from error


def _link_in(redirected: Redirected) -> httpx.URL:
    """The address, if it is one to go to. Messages name no more of it than the host: who has it can read the model."""
    text = redirected.location
    try:
        url = httpx.URL(text[: _LINK_CHARS_MAX + 1])
        _ = url.raw_host  # some names that cannot be written in ASCII are only found out here
    except (httpx.InvalidURL, ValueError) as error:
        raise LinkFailed("the coordinator sent us to what is no address") from error
    if len(text) > _LINK_CHARS_MAX or url.scheme not in ("http", "https") or not url.host or url.userinfo:
        raise LinkFailed("the coordinator sent us to what is no address")
    if redirected.is_secure and url.scheme != "https":
        raise LinkFailed(f"the coordinator sent us to {url.host} over http://, which others can read, and we do not go")
    return url
