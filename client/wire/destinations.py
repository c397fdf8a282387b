"""Where the coordinator's links may lead: to public addresses, and to hosts that the site's policy names.

Otherwise a hostile coordinator could make a hospital's client contact services that trust their network (a printer, a
database, localhost, a cloud's metadata). A coordinator at a private address, or on this machine, has no further rights:
a tunnel or a VPN makes a distant one look so.

| a link leads to | unnamed host | host in `link_hosts`, at that port |
|---|---|---|
| a public address | unless `links = "none"` | yes |
| a private one (10.0.0.0/8, fc00::/7 and the like) | with `links = "private"`, over https on port 443 | yes |
| this machine | no | if `link_hosts` has the address itself, because a name could come to mean this machine |
| link-local, metadata, multicast, reserved | no | no |

A name is looked up once, and the connection goes to an address that was checked. A proxy (HTTPS_PROXY) looks names up
itself, by its own rules; addresses are checked nevertheless.
"""

import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any, Literal, cast

import httpcore
import httpx

LinkLevel = Literal["none", "public", "private"]
_TRIED_MAX = 4
_LINK_HOST = re.compile(r"(?P<host>[^\s:/?#@\[\]%]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_METADATA = frozenset(
    map(
        ip_address,
        (
            "169.254.169.254",
            "100.100.100.200",
            "168.63.129.16",
            "192.0.0.192",
            "fd00:c1::a9fe:a9fe",
            "fd00:42::42",
            "fd20:ce::254",
        ),
    )
)
_AMAZONS_OWN = ip_network("fd00:ec2::/32")  # metadata, a pod's credentials, name service, time
_THIS_NETWORK = ip_network("0.0.0.0/8")
_NAT64 = ip_network("64:ff9b::/96")
_LOCAL_NAT64 = ip_network("64:ff9b:1::/48")  # RFC 8215: local to a site, also for private addresses


class Forbidden(StrEnum):
    """Kinds of addresses that are not public."""

    HERE = "this machine itself"
    LINK_LOCAL = "a link-local address"
    METADATA = "a cloud's metadata service"
    NOBODY = "a multicast or reserved address"
    PRIVATE = "an address of a private network"


def kind_of(host: str) -> Forbidden | None:
    """The kind of a host, by its address or as `localhost`; None for a public address, or a name to look up."""
    if host == "localhost" or host.endswith(".localhost"):
        return Forbidden.HERE
    try:
        address = _innermost(ip_address(host))
    except ValueError:
        return None
    if address in _METADATA or address in _AMAZONS_OWN:
        return Forbidden.METADATA
    if address.is_loopback or address.is_unspecified or address in _THIS_NETWORK:
        return Forbidden.HERE
    if address.is_link_local:
        return Forbidden.LINK_LOCAL
    if address.is_multicast or (address.is_reserved and address not in _LOCAL_NAT64):
        return Forbidden.NOBODY
    is_site_local = isinstance(address, IPv6Address) and (address.is_site_local or address in _LOCAL_NAT64)
    return None if address.is_global and not is_site_local else Forbidden.PRIVATE


@dataclass(frozen=True, slots=True)
class LinkHost:
    """A host that links may lead to. `port`: None for the default of the link's scheme."""

    host: str
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> "LinkHost":
        """`host`, `host:port` or `[IPv6]:port`. Raises `ValueError`."""
        match = _LINK_HOST.fullmatch(text)
        try:
            if match is None or not 0 < int(match["port"] or 443) < 1 << 16:
                raise ValueError
            host = _canonical_host(httpx.URL(f"https://{match['host']}"))
        except (httpx.InvalidURL, ValueError) as error:
            raise ValueError(
                f'link_hosts has {text[:80]!r}, which is not a host or host:port, such as "store.example.org:9000"'
            ) from error
        return cls(host, int(match["port"]) if match["port"] else None)


@dataclass(frozen=True, slots=True)
class LinkRules:
    """Which hosts a site lets links lead to."""

    level: LinkLevel = "public"  # for hosts that are not named
    named: frozenset[LinkHost] = frozenset()

    @property
    def allow_none(self) -> bool:
        return self.level == "none" and not self.named

    def refusal(self, url: httpx.URL, address: str) -> str | None:
        """Why a link may not lead to this address of its host; None if it may."""
        kind, host = kind_of(address), _canonical_host(url)
        if self._names(url, host):
            is_allowed = kind in (None, Forbidden.PRIVATE) or kind is kind_of(host) is Forbidden.HERE
            if is_allowed:
                return None
            if kind is Forbidden.HERE:
                return f"{kind}, which link_hosts can allow only as an IP address"
            return f"{kind}, where no link may lead"
        if kind is None:
            return None if self.level != "none" else "a host that link_hosts in this site's policy does not name"
        if kind is not Forbidden.PRIVATE:
            return f"{kind}, where no link may lead"
        if self.level == "private" and url.scheme == "https" and url.port in (None, 443):
            return None
        return f"{kind}, which this site's policy does not allow (links, link_hosts)"

    def _names(self, url: httpx.URL, host: str) -> bool:
        default = _DEFAULT_PORTS.get(url.scheme)
        port = url.port or default
        return LinkHost(host, port) in self.named or (port == default and LinkHost(host) in self.named)


def guarded(http: httpx.Client, refusal: Callable[[str], str | None]) -> httpx.Client:
    """Make this client connect to no refused address, because the owner of a name chooses its addresses."""
    transport = cast(Any, http)._transport  # as in `http_deadline.bound`, but proxies stay as they are
    if isinstance(transport, httpx.HTTPTransport):
        pool = cast(Any, transport)._pool
        pool._network_backend = _Guard(pool._network_backend, refusal)
    return http


class _Guard(httpcore.NetworkBackend):
    """Wraps a backend: looks names up and checks their addresses, all within the time limit of one connection."""

    def __init__(self, backend: httpcore.NetworkBackend, refusal: Callable[[str], str | None]) -> None:
        self._backend = backend
        self._refusal = refusal

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *more: Any, **options: Any
    ) -> httpcore.NetworkStream:
        until = None if timeout is None else time.monotonic() + timeout
        failed: httpcore.ConnectError | httpcore.ConnectTimeout = httpcore.ConnectError("the name has no address")
        addresses = self._addresses(host, port, timeout)[:_TRIED_MAX]
        for n_before, address in enumerate(addresses):
            share_s = None if until is None else (until - time.monotonic()) / (len(addresses) - n_before)
            if share_s is not None and share_s <= 0:
                raise httpcore.ConnectTimeout("none of its addresses answered in time")
            try:
                return self._backend.connect_tcp(address, port, share_s, *more, **options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failed = error
        raise failed

    def sleep(self, seconds: float) -> None:
        self._backend.sleep(seconds)

    def _addresses(self, host: str, port: int, timeout: float | None) -> list[str]:
        addresses = _look_up(host, port, timeout)
        for address in addresses:
            if (why := self._refusal(address)) is not None:
                raise httpcore.ConnectError(f"its name leads to {why}")
        return addresses


def _look_up(host: str, port: int, timeout: float | None) -> list[str]:
    """The addresses of a host, within a timeout, which the system's look-up lacks. Raises httpcore's errors."""
    found: list[str] = []
    failed: list[Exception] = []

    def ask() -> None:
        try:
            answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found.extend(dict.fromkeys(str(one[4][0]) for one in answers))
        except (OSError, ValueError, OverflowError) as error:  # the last two: malformed names and ports
            failed.append(error)

    asking = threading.Thread(target=ask, name="umbel-look-up", daemon=True)
    asking.start()
    asking.join(timeout)
    if asking.is_alive():
        raise httpcore.ConnectTimeout("looking up the name took too long")
    if failed:
        raise httpcore.ConnectError(str(failed[0])) from failed[0]
    return found


def _canonical_host(url: httpx.URL) -> str:
    """A URL's host in canonical form: lower case, ASCII, IPv6 shortened."""
    host = url.raw_host.decode()
    try:
        return str(ip_address(host))
    except ValueError:
        return host


def _innermost(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address inside an IPv6 address, if there is one; else the address without its zone."""
    if isinstance(address, IPv4Address):
        return address
    address = IPv6Address(int(address))
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address
