"""How this machine reaches a coordinator: one request without a signature, and what its connection shows."""

import ssl
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from umbel.client.errors import CoordinatorMisbehaved, CoordinatorRefused, NotACoordinator
from umbel.client.wire.proxies import proxy_to
from umbel.client.wire.transport import Transport, connect, read_capped

_HEALTHY = b'{"status":"ok"}'
_BYTES_MAX = 4096
_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Reached:
    """A coordinator that has answered, and how.

    `proxy`: the proxy on the way, without a password. `ahead_s`: this machine's clock minus the coordinator's, which
    tells whole seconds; None if it tells none. `tls`, `issuer`: empty without TLS. `expires_at`: when its certificate
    expires, Unix seconds.
    """

    address: str
    took_s: float
    proxy: str | None = None
    ahead_s: float | None = None
    tls: str = ""
    issuer: str = ""
    expires_at: float | None = None


def reach(address: str) -> Reached:
    """Ask the coordinator at `http(s)://host[:port]` for its health, once.

    Raises `ValueError` for another address, or if the environment names an unusable proxy or file of certificates;
    `ClientError` if no answer came, or another one than a coordinator's.
    """
    with connect(address) as addresses:
        began = time.monotonic()
        it = Transport(addresses, lambda _target, _body: {})
        try:
            with it.stream("GET", "/v1/health", until=began + _LIMIT_S) as response:
                tls, is_healthy = _tls_of(response), read_capped(response, _BYTES_MAX) == _HEALTHY
        except CoordinatorRefused as error:
            raise CoordinatorMisbehaved(f"{_other_than(address)} (HTTP {error.status})") from error
        except NotACoordinator as error:
            raise CoordinatorMisbehaved(_other_than(address)) from error
        if not is_healthy:
            raise CoordinatorMisbehaved(_other_than(address))
        took_s = time.monotonic() - began
        return Reached(address, took_s, proxy_to(response.request.url), _ahead_s(response), **tls)


def _other_than(address: str) -> str:
    return (
        f"{address} answers, but not as a coordinator does: check the address, and whether a proxy answers in its place"
    )


def _tls_of(response: httpx.Response) -> dict[str, Any]:
    stream = response.extensions.get("network_stream")
    connection = None if stream is None else stream.get_extra_info("ssl_object")
    if connection is None:
        return {}
    certificate: Any = connection.getpeercert() or {}
    names = dict(pair for part in certificate.get("issuer", ()) for pair in part)
    expires = certificate.get("notAfter")
    return {
        "tls": connection.version() or "",
        "issuer": names.get("organizationName") or names.get("commonName") or "",
        "expires_at": None if expires is None else float(ssl.cert_time_to_seconds(expires)),
    }


def _ahead_s(response: httpx.Response) -> float | None:
    try:
        return time.time() - parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, ValueError, OverflowError):  # the last for a year or an hour of many digits
        return None
