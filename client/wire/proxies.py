"""The proxies that the environment names: which one is on the way, and whether its address says what it should.

No text of this module has a part of a password.
"""

from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

_KINDS = ("http", "https", "all")  # those that httpx reads
UNREADABLE = (
    "the environment names a proxy (HTTPS_PROXY, HTTP_PROXY or ALL_PROXY) whose address cannot be read: write "
    "http://HOST:PORT, or http://USER:PASSWORD@HOST:PORT with each of / ? # @ : % [ ] in the user name and the "
    "password as its code, such as %2F for /"
)


def require_readable_proxies() -> None:
    """Raise `ValueError` for a proxy whose address cannot be read, or would be read as another one.

    In `http://user:12/34@proxy:3128` the password has a `/`. By the rules of addresses this is the proxy `user` at port
    12, so the client would look up the user name, and errors would show the beginning of the password.
    """
    found = getproxies()
    if not all(_is_readable(found[kind]) for kind in _KINDS if found.get(kind)):
        raise ValueError(UNREADABLE)


def proxy_to(url: httpx.URL) -> str | None:
    """The proxy on the way, `host:port`, as the environment names it; None without one."""
    if proxy_bypass(url.host):
        return None
    found = getproxies()
    named = found.get(url.scheme) or found.get("all")
    return _parts(named).netloc.rpartition("@")[2] if named else None


def _is_readable(named: str) -> bool:
    try:
        parts = _parts(named)
        _ = parts.port  # raises ValueError unless it is a number up to 65535
    except ValueError:
        return False
    return bool(parts.hostname) and "@" not in parts.path + parts.query + parts.fragment


def _parts(named: str) -> SplitResult:
    return urlsplit(named if "://" in named else f"http://{named}")
