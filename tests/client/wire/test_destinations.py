"""Where a link may not lead, however the address is written, and that a name cannot change its mind."""

import socket
import threading
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import httpcore
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.client.wire.destinations import Forbidden, LinkHost, LinkLevel, LinkRules, guarded, kind_of


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
        ("10.1.2.3", Forbidden.PRIVATE),
        ("172.16.0.9", Forbidden.PRIVATE),
        ("192.168.1.1", Forbidden.PRIVATE),
        ("100.64.0.1", Forbidden.PRIVATE),
        ("fd12:3456::1", Forbidden.PRIVATE),
        ("fec0::1", Forbidden.PRIVATE),
        ("64:ff9b:1::a00:307", Forbidden.PRIVATE),
        ("64:ff9b::a00:307", Forbidden.PRIVATE),
        ("2002:a00:307::", Forbidden.PRIVATE),
        ("192.0.2.1", Forbidden.PRIVATE),
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
        self, host: str, port: int, timeout: float | None = None, *_: Any, **__: Any
    ) -> httpcore.NetworkStream:
        self.called.append(host)
        raise httpcore.ConnectError("nobody is there")


class Names:
    """What each name leads to, at each time that it is asked."""

    def __init__(self, **names: list[list[str]]) -> None:
        self.names = names

    def look_up(self, host: str, port: int, **_: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        found = self.names.get(host.replace(".", "_"))
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in (found.pop(0) if found else [host])]


def called_for(names: Names, link: str, rules: LinkRules, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where a guarded client connects to for a link."""
    monkeypatch.setattr(socket, "getaddrinfo", names.look_up)
    network, url = Network(), httpx.URL(link)
    with httpx.Client(trust_env=False) as http:
        http._transport._pool._network_backend = network  # type: ignore[attr-defined]  # as `deadline.bound` does
        with pytest.raises(httpx.ConnectError):
            guarded(http, lambda address: rules.refusal(url, address)).get(url)
    return network.called


PRIVATE = LinkRules("private")


def rules(level: LinkLevel, *hosts: str) -> LinkRules:
    return LinkRules(level, frozenset(map(LinkHost.parse, hosts)))


def test_a_name_is_looked_up_once_and_what_was_checked_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(bucket_example=[["10.0.0.7", "10.0.0.8"], ["127.0.0.1"]])
    assert called_for(names, "https://bucket.example/x", PRIVATE, monkeypatch) == ["10.0.0.7", "10.0.0.8"]
    assert names.names["bucket_example"] == [["127.0.0.1"]]


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["10.0.0.7", "169.254.169.254"], ["::1"]])
@pytest.mark.parametrize("named", [(), ("bucket.example",)])
def test_a_name_that_leads_here_is_not_followed(
    addresses: list[str], named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the site names it: who owns a name may have it lead here tomorrow."""
    names = Names(bucket_example=[addresses])
    assert called_for(names, "https://bucket.example/x", rules("private", *named), monkeypatch) == []


RULES = {
    "none": rules("none"),
    "public": rules("public"),
    "private": rules("private"),
    "host": rules("none", "STORE.inner"),
    "host:9000": rules("none", "store.inner:9000"),
    "address": rules("none", "10.0.3.7", "[FD12::7]", "169.254.169.254", "127.0.0.1:9000", "localhost:9000"),
}


@pytest.mark.parametrize(
    ("link", "address", "allowed"),
    [
        ("https://bucket.example/x", "8.8.8.8", {"public", "private"}),
        ("http://bucket.example/x", "8.8.8.8", {"public", "private"}),
        ("https://bucket.example:9000/x", "8.8.8.8", {"public", "private"}),
        ("https://store.inner/x", "8.8.8.8", {"public", "private", "host"}),
        ("https://store.inner/x", "10.0.3.7", {"private", "host"}),
        ("http://store.inner/x", "10.0.3.7", {"host"}),  # a request as such can do harm where nobody asks who makes it
        ("https://store.inner:443/x", "10.0.3.7", {"private", "host"}),
        ("https://store.inner:5432/x", "10.0.3.7", set()),
        ("https://store.inner:9000/x", "10.0.3.7", {"host:9000"}),
        ("http://store.inner:9000/x", "10.0.3.7", {"host:9000"}),
        ("https://10.0.3.7/x", "10.0.3.7", {"private", "address"}),
        ("https://[fd12::7]/x", "fd12::7", {"private", "address"}),
        ("http://127.0.0.1:9000/x", "127.0.0.1", {"address"}),
        ("http://localhost:9000/x", "127.0.0.1", {"address"}),
        ("http://127.0.0.1:22/x", "127.0.0.1", set()),
        ("https://store.inner/x", "127.0.0.1", set()),
        ("https://store.inner/x", "fe80::1", set()),
        ("https://store.inner/x", "169.254.169.254", set()),
        ("https://169.254.169.254/x", "169.254.169.254", set()),
    ],
)
def test_a_link_leads_where_the_sites_rules_let_it_and_nowhere_else(link: str, address: str, allowed: set[str]) -> None:
    found = {name for name, one in RULES.items() if one.refusal(httpx.URL(link), address) is None}
    assert found == allowed


@pytest.mark.parametrize("level", ["none", "public", "private"])
def test_no_link_is_followed_where_none_may_lead_anywhere(level: LinkLevel) -> None:
    assert rules(level).allow_none is (level == "none")
    assert not rules(level, "store.inner").allow_none


NO_HOSTS = [
    "",
    "a b",
    "a/b",
    "user@host",
    "https://host",
    "host:",
    "host:0",
    "host:65536",
    "host:x",
    "::1",
    "[::1",
    "a?b",
]


@pytest.mark.parametrize("text", [*NO_HOSTS, "a#b", "%61"])
def test_what_is_no_host_is_refused_where_hosts_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="link_hosts has"):
        LinkHost.parse(text)


def test_a_look_up_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def look_up(*_: object, **__: object) -> list[object]:
        answered.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with httpx.Client(trust_env=False, timeout=0.05) as http, pytest.raises(httpx.ConnectTimeout):
        guarded(http, lambda _: None).get("http://slow.example/x")
    answered.set()


@pytest.mark.parametrize("url", ["http://host.example:99999/x", "http://a\u0000b.example/x"])
def test_what_nobody_can_look_up_is_an_address_where_nobody_is(url: str) -> None:
    with httpx.Client(trust_env=False) as http, pytest.raises((httpx.ConnectError, httpx.InvalidURL)):
        guarded(http, lambda _: None).get(url)


def test_all_addresses_of_a_name_together_get_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a host with four addresses that do not answer could be told from one with one."""
    shares = list[float]()

    class Silent(Network):
        def connect_tcp(self, host: str, port: int, timeout: float | None = None, *_: Any, **__: Any) -> Any:
            assert timeout is not None
            shares.append(timeout)
            raise httpcore.ConnectTimeout("no answer")

    monkeypatch.setattr(socket, "getaddrinfo", Names(four_example=[[f"8.8.8.{i}" for i in range(6)]]).look_up)
    with httpx.Client(trust_env=False, timeout=8.0) as http:
        http._transport._pool._network_backend = Silent()  # type: ignore[attr-defined]  # as `deadline.bound` does
        with pytest.raises(httpx.ConnectTimeout):
            guarded(http, lambda _: None).get("http://four.example/x")
    assert len(shares) == 4
    assert shares[0] <= 2.0
