"""Through a real proxy: the variables of the environment are kept to, and a proxy that refuses is named."""

import base64
import select
import socket
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.servers.tls_server import Server, issued, serving
from umbel.client.errors import CoordinatorUnreachable
from umbel.client.wire.reach import reach
from umbel.client.wire.transport import Transport, connect

_PIECE_BYTES = 1 << 16


class Tunnel(BaseHTTPRequestHandler):
    """CONNECT as RFC 9110 has it. It sees where a client wants to go, and encrypted bytes."""

    def do_CONNECT(self) -> None:
        proxy = self._proxy
        proxy.asked.append(self.path)
        if proxy.password and self.headers.get("Proxy-Authorization") != proxy.password:
            self.send_error(407, "Proxy Authentication Required")
        elif not proxy.allows:
            self.send_error(403, "Forbidden")
        else:
            host, _, port = self.path.rpartition(":")
            with socket.create_connection((host, int(port))) as there:
                self.send_response(200)
                self.end_headers()
                self._carry(there)

    def _carry(self, there: socket.socket) -> None:
        ways = {self.connection: there, there: self.connection}
        while True:
            for one in select.select(list(ways), [], [])[0]:
                if not (piece := one.recv(_PIECE_BYTES)):
                    return
                ways[one].sendall(piece)
                self._proxy.carried += piece

    @property
    def _proxy(self) -> "Proxy":
        assert isinstance(self.server, Proxy)
        return self.server

    def log_message(self, format: str, *args: object) -> None:
        pass


class Proxy(ThreadingHTTPServer):
    """`asked`: the addresses that clients wanted; `carried`: all bytes of the tunnels."""

    daemon_threads = True

    def __init__(self, password: str = "", *, allows: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Tunnel)
        self.asked, self.carried = list[str](), b""
        self.password = "Basic " + base64.b64encode(password.encode()).decode() if password else ""
        self.allows = allows

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


@contextmanager
def running(proxy: Proxy) -> Generator[Proxy]:
    with proxy:
        thread = Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()


@contextmanager
def transport(server: Server) -> Generator[Transport]:
    with connect(f"https://127.0.0.1:{server.server_port}") as addresses:
        yield Transport(addresses, lambda _target, _body: {})


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", *(f"{kind}_PROXY" for kind in ("HTTP", "HTTPS", "ALL", "NO"))):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.mark.parametrize("user", ["", "ward:s3cret"])
def test_requests_go_through_the_proxy_which_sees_the_coordinators_name_and_no_content(
    user: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = issued(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    with serving(certificates) as server, running(Proxy(user)) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://{user}{'@' if user else ''}{proxy.address}")
        with transport(server) as it:
            assert it.ask("GET", "/private-path", headers={"X-Body": "private-field"}).body == b"ok"
        assert proxy.asked == [f"127.0.0.1:{server.server_port}"]
        assert proxy.carried
        assert b"private" not in proxy.carried


def test_a_doctor_says_that_the_way_is_through_the_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates = issued(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    with serving(certificates) as server, running(Proxy("ward:s3cret")) as proxy:
        server.body = b'{"status":"ok"}'
        monkeypatch.setenv("HTTPS_PROXY", f"http://ward:s3cret@{proxy.address}")
        reached = reach(f"https://127.0.0.1:{server.server_port}")
    assert reached.proxy == proxy.address, "without the password"
    assert reached.tls.startswith("TLSv1.")
    assert reached.expires_at is not None


def test_a_host_in_no_proxy_is_reached_without_the_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates = issued(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    monkeypatch.setenv("NO_PROXY", "example.org,127.0.0.1")
    with serving(certificates) as server, running(Proxy()) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy.address}")
        with transport(server) as it:
            assert it.ask("GET", "/").body == b"ok"
        assert proxy.asked == []


@pytest.mark.parametrize(
    ("password", "allows", "words"),
    [
        ("", False, r"the proxy {} does not connect to 127\.0\.0\.1:\d+ \(it answered '403 .*Ask IT to allow"),
        ("ward:other", True, r"the proxy {} asks for a user name and a password: set HTTPS_PROXY="),
    ],
    ids=["forbidden", "password"],
)
def test_a_proxy_that_refuses_is_named_with_what_to_do(
    password: str, allows: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(issued(tmp_path)) as server, running(Proxy(password, allows=allows)) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://ward:s3cret@{proxy.address}")
        said = words.format(proxy.address.replace(".", r"\."))
        with transport(server) as it, pytest.raises(CoordinatorUnreachable, match=said) as told:
            it.ask("GET", "/")
        assert "s3cret" not in str(told.value)


def test_a_proxy_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Proxy() as gone:
        address = gone.address
    with serving(issued(tmp_path)) as server:
        for proxy, words in (
            (address, f"the proxy {address} refused the connection, so no proxy listens there"),
            ("proxy.invalid:3128", r"the name of the proxy proxy\.invalid:3128 does not resolve"),
        ):
            monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy}")
            with transport(server) as it, pytest.raises(CoordinatorUnreachable, match=words):
                it.ask("GET", "/")


def test_a_socks_proxy_without_its_package_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"a SOCKS proxy .*\(pip install socksio\)"):
        connect("https://coordinator.invalid")


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "https_proxy"])
@pytest.mark.parametrize("scheme", ["http://", "https://", ""])
@pytest.mark.parametrize(
    "password",
    ["geh/eim", "471/eim", "471?eim", "471#eim", "471@eim/815", "471@815#eim", "99999/eim", "471[eim", "471\neim"],
)
def test_a_password_that_is_no_part_of_an_address_is_refused_without_a_word_of_it(
    variable: str, scheme: str, password: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With digits before the `/`, the address is one of another proxy: `site` at port 471."""
    monkeypatch.setenv(variable, f"{scheme}site:{password}@proxy.example:3128")
    with pytest.raises(ValueError, match="whose address cannot be read") as refused:
        connect("https://fl.example.org")
    shown = "".join(traceback.format_exception(refused.value))
    assert not [part for part in ("geh", "eim", "471", "815", "99999") if part in shown]


@pytest.mark.parametrize(
    "named", ["http://{}/", "http://site:471%2Feim@{}", "site:471%2Feim@{}", "http://si%40te:a:b@{}"]
)
def test_a_password_with_codes_is_accepted(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates = issued(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    with serving(certificates) as server, running(Proxy()) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", named.format(proxy.address))
        with transport(server) as it:
            assert it.ask("GET", "/").body == b"ok"
        assert proxy.asked
