"""A server with TLS at 127.0.0.1, and the certificates that it shows."""

import datetime
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)
_NOW = datetime.datetime.now(datetime.UTC)


@dataclass(frozen=True, slots=True)
class Issued:
    """Files of a certificate authority and of a certificate that it has signed."""

    ca: Path
    chain: Path  # with its key


def issued(folder: Path, *, address: str = "127.0.0.1", first_day: int = -2, last_day: int = 2) -> Issued:
    """`first_day`, `last_day`: from today on."""
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name, name = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in ("Ward CA", "coordinator"))

    def of(subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        serial = x509.random_serial_number()
        return x509.CertificateBuilder(
            ca_name, subject, public, serial, _NOW + first_day * _DAY, _NOW + last_day * _DAY
        )

    is_ca = x509.BasicConstraints(ca=True, path_length=None)
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    ca = of(ca_name, ca_key.public_key()).add_extension(is_ca, critical=True).add_extension(usage, critical=True)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    server = of(name, key.public_key()).add_extension(names, critical=False)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    found = Issued(folder / "ca.pem", folder / "chain.pem")
    found.ca.write_bytes(ca.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    signed = server.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    found.chain.write_bytes(signed + secret)
    return found


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        refusal = next((refusal for start, refusal in self.server.refuses.items() if self.path.startswith(start)), None)
        status, body = refusal or (200, self.server.body)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def date_time_string(self, timestamp: float | None = None) -> str:
        """The time of the header Date."""
        assert isinstance(self.server, Server)
        return self.server.date or super().date_time_string(int(time.time() + self.server.ahead_s))

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Its `context` may be changed while it serves, as a proxy's certificate is. `body`: of all its answers but those
    of `refuses`, which has the status and the body for the start of a path; `ahead_s`: of its clock; `date`: what it
    says instead.
    """

    context: ssl.SSLContext | None = None
    body = b"ok"
    ahead_s = 0.0
    date = ""
    refuses: Mapping[str, tuple[int, bytes]] = {}

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, peer = self.socket.accept()
        if self.context is None:
            return connection, peer
        return self.context.wrap_socket(connection, server_side=True), peer

    def handle_error(self, request: object, client_address: object) -> None:
        pass


def context_of(certificates: Issued) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.chain)
    return context


@contextmanager
def serving(certificates: Issued | None) -> Generator[Server]:
    """A server at 127.0.0.1, with TLS if it has certificates."""
    with Server(("127.0.0.1", 0), Ready) as server:
        server.context = context_of(certificates) if certificates else None
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
