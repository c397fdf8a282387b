"""Why no answer came: each kind of failure of a real connection, in words that say what to do."""

import logging
import ssl
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.client.doubles.dripping import HEAD, dripping
from tests.servers.tls_server import Server, context_of, issued, serving
from umbel.client.errors import CertificateRefused, CoordinatorUnreachable
from umbel.client.wire.http_deadline import timed_by
from umbel.client.wire.timing import Backoff, Timing
from umbel.client.wire.transport import Patience, Transport, connect, patiently


def unsigned(_target: object, _body: bytes) -> Mapping[str, str]:
    return {}


@contextmanager
def transport(server: Server, scheme: str = "https") -> Generator[Transport]:
    with connect(f"{scheme}://127.0.0.1:{server.server_port}") as addresses:
        yield Transport(addresses, unsigned)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_a_certificate_of_a_ca_that_the_environment_names_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = issued(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    with serving(certificates) as server, transport(server) as it:
        assert it.ask("GET", "/").body == b"ok"


def test_a_ca_that_is_not_trusted_ends_the_client_with_the_variable_to_set(tmp_path: Path) -> None:
    with (
        serving(issued(tmp_path)) as server,
        transport(server) as it,
        pytest.raises(
            CertificateRefused, match=r"this machine does not trust the certificate at 127\.0\.0\.1:"
        ) as told,
    ):
        patiently(lambda: it.ask("GET", "/"), Patience(wait=_no_wait))
    assert "Set SSL_CERT_FILE to a file with the coordinator's CA, in PEM" in str(told.value)


def test_a_file_of_cas_that_has_not_the_right_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("SSL_CERT_FILE", str(other := issued(tmp_path / "other").ca))
    words = f"SSL_CERT_FILE is {other}, and has no CA that has signed it"
    with serving(issued(tmp_path)) as server, transport(server) as it, pytest.raises(CertificateRefused, match=words):
        it.ask("GET", "/")


@pytest.mark.parametrize(
    ("address", "first_day", "last_day", "kind", "words"),
    [
        (
            "127.0.0.2",
            -2,
            2,
            CertificateRefused,
            r"is for another name \(.*127\.0\.0\.1.*\)\. Use the name in the certificate",
        ),
        ("127.0.0.1", -2, -1, CoordinatorUnreachable, r"has expired\. Ask the coordinator's operator to renew it"),
        ("127.0.0.1", 1, 2, CoordinatorUnreachable, r"is not valid yet\. Check this machine's clock"),
    ],
)
def test_a_wrong_name_ends_the_client_and_a_wrong_time_is_waited_for(
    address: str,
    first_day: int,
    last_day: int,
    kind: type[Exception],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An expired certificate is renewed, and a clock may be set only after the machine's start."""
    certificates = issued(tmp_path, address=address, first_day=first_day, last_day=last_day)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    with serving(certificates) as server, transport(server) as it, pytest.raises(kind, match=words):
        it.ask("GET", "/")


def test_a_certificate_that_goes_wrong_later_is_waited_for_with_the_reason_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The operator renews it, and no site needs a person for that."""
    good = issued(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(good.ca))
    (tmp_path / "other").mkdir()
    caplog.set_level(logging.INFO, logger="umbel.client")
    with serving(good) as server, transport(server) as it:
        assert it.ask("GET", "/", headers={"Connection": "close"}).body == b"ok"
        fit, server.context = server.context, context_of(issued(tmp_path / "other"))

        def renew(_seconds: float) -> None:
            server.context = fit

        assert patiently(lambda: it.ask("GET", "/"), Patience(wait=renew)).body == b"ok"
    assert "this machine does not trust the certificate" in caplog.text
    assert "the coordinator answers again" in caplog.text


@pytest.mark.parametrize(("version", "is_taken"), [("TLSv1_1", False), ("TLSv1_2", True), ("TLSv1_3", True)])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_tls_before_1_2_is_refused(
    version: str, is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = issued(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    with serving(certificates) as server, transport(server) as it:
        assert server.context is not None
        server.context.set_ciphers("ALL:@SECLEVEL=0")  # so that OpenSSL itself would speak TLS 1.1
        server.context.minimum_version = server.context.maximum_version = ssl.TLSVersion[version]
        if is_taken:
            assert it.ask("GET", "/").body == b"ok"
        else:
            with pytest.raises(CoordinatorUnreachable, match=r"(?i)protocol.version"):
                it.ask("GET", "/")


def test_a_server_without_tls_is_named_as_such() -> None:
    words = r"does not speak TLS.*its address begins with http://"
    with serving(None) as server, transport(server) as it, pytest.raises(CoordinatorUnreachable, match=words):
        it.ask("GET", "/")


def test_a_refused_connection_and_an_unknown_name_have_plain_words() -> None:
    with serving(None) as server:
        port = server.server_port
    for address, words in (
        (f"http://127.0.0.1:{port}", "the connection was refused, so no coordinator listens there"),
        ("http://coordinator.invalid", r"a name on the way to coordinator\.invalid does not resolve"),
    ):
        with connect(address) as addresses, pytest.raises(CoordinatorUnreachable, match=words):
            Transport(addresses, unsigned).ask("GET", "/")


@pytest.mark.parametrize("head", [b"", HEAD])
def test_an_answer_that_does_not_come_or_does_not_end_has_plain_words(head: bytes) -> None:
    short = Timing(answer_s=0.5, stall_s=3.0, backoff=Backoff())
    words = r"no answer from the coordinator at 127.*: the answer did not come in time, or not all of it"
    with (
        dripping(b"", head) as url,
        connect(url) as addresses,
        timed_by(short),
        pytest.raises(CoordinatorUnreachable, match=words),
    ):
        Transport(addresses, unsigned).ask("GET", "/")


@pytest.mark.parametrize("write", [None, lambda path: path.write_text("no PEM")])
def test_a_file_of_cas_that_cannot_be_read_is_named(
    write: Callable[[Path], object] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hospital-ca.pem"
    if write is not None:
        write(path)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    with pytest.raises(ValueError, match=f"the certificates in {path} cannot be read .*SSL_CERT_FILE must name a file"):
        connect("https://127.0.0.1:9")


def _no_wait(_seconds: float) -> None:
    raise AssertionError("there is nothing to wait for")
