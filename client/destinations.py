"""Where a link of the coordinator's may lead: not to this machine, nor to what only this machine's network answers.

A coordinator that is hostile could otherwise have a hospital's client call on services that trust whoever can reach
them, such as one on localhost or a cloud's metadata service, and learn from what the client does next what is there.
Private addresses (10.0.0.0/8 and the like) are allowed: hospitals keep their buckets there.

A name is looked up once, and the connection goes to an address that was checked: it cannot be another a moment later.
Where a proxy is set (HTTPS_PROXY), it looks names up itself and its own rules hold; addresses are checked all the same.
"""

import socket
from collections.abc import Iterable
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any, cast

import httpcore
import httpx

_TRIED_MAX = 4
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


class Forbidden(StrEnum):
    """Kinds of places that a link may not lead to, in words."""

    HERE = "this machine itself"
    LINK_LOCAL = "an address of this network segment only"
    METADATA = "a cloud's metadata service"
    NOBODY = "no single host's address"


def kind_of(host: str) -> Forbidden | None:
    """Why nobody may be sent to a host, by its address, or by the one name that always means this machine."""
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
    return Forbidden.NOBODY if address.is_multicast or address.is_reserved else None


def guarded(http: httpx.Client, coordinator: str) -> httpx.Client:
    """Have this client connect to no forbidden address. `coordinator`: the host that sends us.

    Who took a coordinator on this machine (a demo, a test) may be sent to its like. Its address must stand in the URL:
    what a name leads to is the choice of whoever owns the name.
    """
    transport = cast(
        Any, http
    )._transport  # the seam of `deadline.bound`; other than there, proxies are left as they are
    if isinstance(transport, httpx.HTTPTransport):
        pool = cast(Any, transport)._pool
        pool._network_backend = _Guard(pool._network_backend, kind_of(coordinator))
    return http


class _Guard(httpcore.NetworkBackend):
    """The backend it wraps, for connections to addresses that are looked up and checked here."""

    def __init__(self, backend: httpcore.NetworkBackend, allowed: Forbidden | None) -> None:
        self._backend = backend
        self._allowed = allowed

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        failed: httpcore.ConnectError | httpcore.ConnectTimeout = httpcore.ConnectError("the name has no address")
        for address in self._addresses(host, port)[:_TRIED_MAX]:
            try:
                return self._backend.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failed = error
        raise failed

    def sleep(self, seconds: float) -> None:
        self._backend.sleep(seconds)

    def _addresses(self, host: str, port: int) -> list[str]:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(str(error)) from error
        addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
        for address in addresses:
            if (kind := kind_of(address)) not in (None, self._allowed):
                raise httpcore.ConnectError(f"it leads to {kind}, where no link may")
        return addresses


def _innermost(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address that one of IPv6 stands for, if it is such; without the zone, with which it equals no other."""
    if isinstance(address, IPv4Address):
        return address
    address = IPv6Address(int(address))
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address
