"""Where a link may not lead, however the address is written, and that a name cannot change its mind."""

import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address

import httpcore
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.client.destinations import Forbidden, guarded, kind_of


@pytest.mark.parametrize(
    ("host", "kind"),
    [
        ("127.0.0.1", Forbidden.HERE),
        ("127.8.9.10", Forbidden.HERE),
        ("0.0.0.0", Forbidden.HERE),
        ("0.1.2.3", Forbidden.HERE),
        ("::1", Forbidden.HERE),
        ("::", Forbidden.HERE),
        ("::ffff:127.0.0.1", Forbidden.HERE),
        ("64:ff9b::7f00:1", Forbidden.HERE),
        ("2002:7f00:1::", Forbidden.HERE),
        ("localhost", Forbidden.HERE),
        ("any.localhost", Forbidden.HERE),
        ("169.254.169.254", Forbidden.METADATA),
        ("::ffff:169.254.169.254", Forbidden.METADATA),
        ("fd00:ec2::254", Forbidden.METADATA),
        ("fd00:ec2::254%1", Forbidden.METADATA),
        ("fd00:ec2::23", Forbidden.METADATA),
        ("fd20:ce::254", Forbidden.METADATA),
        ("100.100.100.200", Forbidden.METADATA),
        ("168.63.129.16", Forbidden.METADATA),
        ("169.254.1.1", Forbidden.LINK_LOCAL),
        ("fe80::1%eth0", Forbidden.LINK_LOCAL),
        ("224.0.0.1", Forbidden.NOBODY),
        ("255.255.255.255", Forbidden.NOBODY),
        ("ff02::1", Forbidden.NOBODY),
        ("10.1.2.3", None),
        ("172.16.0.9", None),
        ("192.168.1.1", None),
        ("100.64.0.1", None),
        ("fd12:3456::1", None),
        ("8.8.8.8", None),
        ("2a00:1450:4001::1", None),
        ("bucket.example", None),
        ("notlocalhost", None),
    ],
)
def test_every_address_is_of_its_kind(host: str, kind: Forbidden | None) -> None:
    assert kind_of(host) is kind


@given(st.ip_addresses(v=4))
def test_an_address_in_ipv6s_clothes_is_of_the_same_kind(address: IPv4Address) -> None:
    for prefix in ("::ffff:0:0", "64:ff9b::"):
        assert kind_of(str(IPv6Address(int(IPv6Address(prefix)) | int(address)))) is kind_of(str(address))


class Network(httpcore.NetworkBackend):
    """Notes where connections go; none is answered."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        self.called.append(host)
        raise httpcore.ConnectError("nobody is there")


def called_for(names: dict[str, list[list[str]]], url: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where a guarded client connects to for `url`. `names`: what a name leads to, at each time that it is asked."""

    def look_up(host: str, port: int, **_: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in names[host].pop(0)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    network = Network()
    with httpx.Client(trust_env=False) as http:
        http._transport._pool._network_backend = network  # type: ignore[attr-defined]  # as `deadline.bound` does
        with pytest.raises(httpx.ConnectError):
            guarded(http, "coordinator.example").get(url)
    return network.called


def test_a_name_is_looked_up_once_and_what_was_checked_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"bucket.example": [["10.0.0.7", "10.0.0.8"], ["127.0.0.1"]]}
    assert called_for(names, "http://bucket.example/x", monkeypatch) == ["10.0.0.7", "10.0.0.8"]
    assert names["bucket.example"] == [["127.0.0.1"]]


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["10.0.0.7", "169.254.169.254"], ["::1"]])
def test_a_name_that_leads_here_is_not_followed(addresses: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert called_for({"bucket.example": [addresses]}, "http://bucket.example/x", monkeypatch) == []
